"""One step for several requests is, bit for bit, a step for each."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from diffusers import EulerDiscreteScheduler

from common.params import SchedulerSpec
from services.worker.pipelines.protocol import StepPipeline
from services.worker.pipelines.solvers import solve
from services.worker.pipelines.solvers_together import MAX_CPU_ELEMENTS, MIN_CPU_MEMBERS, solve_together
from services.worker.state import DiffusionRequestState
from tests.worker.driving import prepared, request

EULER = SchedulerSpec("EulerDiscreteScheduler")
DDIM = SchedulerSpec("DDIMScheduler", (("clip_sample", False),))
# The checkpoint says what is predicted: noise, velocity, or that of a flow.
KINDS = {
    "flow-match Euler": ("sd3", None),
    "Euler, noise": ("sd1", EULER),
    "Euler, velocity": ("sd2", EULER),
    "DDIM, noise": ("sd1", DDIM),
    "DDIM, clipped": ("sd1", SchedulerSpec("DDIMScheduler", (("clip_sample", True), ("clip_sample_range", 0.5)))),
    "DDIM, velocity": ("sd2", None),
    "DDIM, the picture": ("sd1", SchedulerSpec("DDIMScheduler", (("prediction_type", "sample"),))),
}
SHAPES = {"picture": (1, 4, 6, 8), "packed": (1, 35, 8), "video": (1, 4, 3, 4, 4)}
FLOAT, HALF = torch.float32, torch.bfloat16
LEAST_STEPS = 6


def noise(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def advance(states: Sequence[DiffusionRequestState], latents: Sequence[torch.Tensor | Exception]) -> None:
    for state, new in zip(states, latents, strict=True):
        assert isinstance(new, torch.Tensor), new
        state.latents = new
        state.step_index += 1


def at_different_steps(
    pipeline: StepPipeline,
    scheduler: SchedulerSpec | None,
    shape: Sequence[int] = SHAPES["picture"],
    dtype: torch.dtype = FLOAT,
    members: int = MIN_CPU_MEMBERS,
) -> list[DiffusionRequestState]:
    """Requests of which each has done one step more than the one before, and has more steps."""
    states = []
    for index in range(members):
        state = prepared(
            pipeline, request(str(index), scheduler=scheduler, num_inference_steps=LEAST_STEPS + 2 * index)
        )
        state.latents = noise(shape, dtype, index)
        for _ in range(index):
            state.model_input()
            advance([state], solve([state], [noise(shape, dtype, 10)]))
        states.append(state)
    return states


def twin(state: DiffusionRequestState) -> DiffusionRequestState:
    """A state that may be stepped apart. Its solver is of a kind that draws no noise."""
    return dataclasses.replace(state, scheduler=copy.deepcopy(state.scheduler))


@pytest.mark.parametrize("dtypes", [(FLOAT, FLOAT), (HALF, HALF), (FLOAT, HALF)], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_together_is_the_step_of_each(
    tiny: Callable[[str], StepPipeline], kind: str, shape: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    name, scheduler = KINDS[kind]
    states = at_different_steps(tiny(name), scheduler, SHAPES[shape], dtypes[0])
    apart = [twin(state) for state in states]
    for step in range(LEAST_STEPS):
        for state in (*states, *apart):
            state.model_input()
        preds = [noise(SHAPES[shape], dtypes[1], 20 + step + index) for index in range(len(states))]
        together = solve_together(states, preds)
        assert sorted(together) == list(range(len(states)))
        alone = [solve([state], [pred])[0] for state, pred in zip(apart, preds, strict=True)]
        for index, expected in enumerate(alone):
            assert isinstance(expected, torch.Tensor)
            assert together[index].dtype == expected.dtype == dtypes[0]
            assert torch.equal(together[index], expected), (step, index)
        advance(states, [together[index] for index in range(len(states))])
        advance(apart, alone)


@pytest.mark.parametrize("kind", ["flow-match Euler", "Euler, noise", "DDIM, noise"])
def test_a_request_may_be_stepped_together_and_alone_by_turns(tiny: Callable[[str], StepPipeline], kind: str) -> None:
    name, scheduler = KINDS[kind]
    states = at_different_steps(tiny(name), scheduler)
    apart = twin(states[0])
    for step in range(LEAST_STEPS):
        for state in (*states, apart):
            state.model_input()
        preds = [noise(SHAPES["picture"], FLOAT, 30 + step + index) for index in range(len(states))]
        company = states if step % 2 else states[:1]
        advance(company, solve(company, preds[: len(company)]))
        advance([apart], solve([apart], preds[:1]))
        assert torch.equal(states[0].latents, apart.latents), step


def test_solvers_of_all_kinds_in_one_group_are_parted_and_put_back_in_their_places(
    tiny: Callable[[str], StepPipeline],
) -> None:
    euler = at_different_steps(tiny("sd1"), EULER)
    ddim = at_different_steps(tiny("sd1"), DDIM)
    history = at_different_steps(tiny("sd1"), SchedulerSpec("UniPCMultistepScheduler"))
    states = [state for trio in zip(euler, ddim, history, strict=True) for state in trio]
    apart = [twin(state) for state in states]
    preds = [noise(SHAPES["picture"], FLOAT, index) for index in range(len(states))]
    for state in (*states, *apart):
        state.model_input()
    for got, state, pred in zip(solve(states, preds), apart, preds, strict=True):
        expected = solve([state], [pred])[0]
        assert isinstance(got, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("name", "scheduler", "changes"),
    [
        ("sd3", SchedulerSpec("FlowMatchEulerDiscreteScheduler", (("stochastic_sampling", True),)), {}),
        ("sd3", SchedulerSpec("FlowMatchHeunDiscreteScheduler"), {}),
        ("sd1", SchedulerSpec("DDIMScheduler", (("thresholding", True),)), {}),
        ("sd1", SchedulerSpec("DDIMParallelScheduler"), {}),
        ("sd1", SchedulerSpec("EulerAncestralDiscreteScheduler"), {}),
        ("sd1", EULER, {"members": MIN_CPU_MEMBERS - 1}),
        ("sd1", EULER, {"shape": (1, 1, 1, MAX_CPU_ELEMENTS + 1)}),
    ],
    ids=str,
)
def test_what_is_not_exact_or_does_not_pay_is_left_to_each_ones_own_solver(
    tiny: Callable[[str], StepPipeline], name: str, scheduler: SchedulerSpec, changes: dict[str, Any]
) -> None:
    states = at_different_steps(tiny(name), scheduler, **changes)
    indices = [getattr(state.scheduler, "_step_index", None) for state in states]
    assert solve_together(states, [state.latents for state in states]) == {}
    assert [getattr(state.scheduler, "_step_index", None) for state in states] == indices


def test_noise_that_ddim_is_told_to_draw_is_drawn_by_each(tiny: Callable[[str], StepPipeline]) -> None:
    states = at_different_steps(tiny("sd1"), DDIM)
    for state in states:
        state.extra_step_kwargs["eta"] = 0.5
    assert solve_together(states, [state.latents for state in states]) == {}


def test_sizes_and_settings_of_their_own_part_requests(tiny: Callable[[str], StepPipeline]) -> None:
    small = at_different_steps(tiny("sd1"), DDIM)
    big = at_different_steps(tiny("sd1"), DDIM, (1, 4, 8, 8))
    clipped = at_different_steps(tiny("sd1"), SchedulerSpec("DDIMScheduler"), members=2)
    states = [*small, *big, *clipped]
    together = solve_together(states, [state.latents for state in states])
    assert sorted(together) == list(range(len(small) + len(big)))
    assert all(together[index].shape == states[index].latents.shape for index in together)


@pytest.mark.parametrize("kind", ["flow-match Euler", "Euler, noise", "DDIM, noise"])
def test_one_solvers_trouble_is_its_own(tiny: Callable[[str], StepPipeline], kind: str) -> None:
    name, scheduler = KINDS[kind]
    states = at_different_steps(tiny(name), scheduler)
    for state in states:
        state.model_input()
    apart = [twin(state) for state in states]
    broken: Any = states[2].scheduler
    if hasattr(broken, "sigmas"):
        broken.sigmas = broken.sigmas[: broken.step_index + 1]
    else:
        broken.alphas_cumprod = broken.alphas_cumprod[:5]
    preds = [noise(SHAPES["picture"], FLOAT, index) for index in range(len(states))]
    solved = solve(states, preds)
    assert [isinstance(new, IndexError) for new in solved] == [False, False, True, False]
    for index in (0, 1, 3):
        got, expected = solved[index], solve([apart[index]], [preds[index]])[0]
        assert isinstance(got, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert torch.equal(got, expected)


def test_values_that_are_no_numbers_stay_in_their_row(tiny: Callable[[str], StepPipeline]) -> None:
    states = at_different_steps(tiny("sd3"), None)
    preds = [noise(SHAPES["picture"], FLOAT, index) for index in range(len(states))]
    preds[1] = preds[1] * torch.nan
    together = solve_together(states, preds)
    assert [bool(torch.isfinite(together[index]).all()) for index in range(len(states))] == [True, False, True, True]


def test_a_subclass_of_a_known_solver_may_do_something_else(tiny: Callable[[str], StepPipeline]) -> None:
    states = at_different_steps(tiny("sd1"), EULER, members=MIN_CPU_MEMBERS + 1)
    states[0].scheduler.__class__ = type("Other", (EulerDiscreteScheduler,), {})
    assert sorted(solve_together(states, [state.latents for state in states])) == [1, 2, 3, 4]
