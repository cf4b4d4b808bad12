"""One request's trouble is its own: every method fails for one request, and its neighbours' pictures don't change."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from PIL import Image

from common.errors import ErrorInfo, RequestError
from services.worker import halving
from services.worker.finite import FiniteWatch
from services.worker.input_batch import StepInputBatch
from services.worker.pipelines.protocol import StepPipeline
from services.worker.runner import StepRunner
from services.worker.state import DiffusionRequestState
from tests.worker.driving import Wrapped, draw_together, prepared, request
from tests.worker.solo import known_solo, worst_difference

GOOD = [request("a", seed=1), request("b", seed=2, prompt="frog"), request("c", seed=3, guidance_scale=1.0)]
CULPRIT = request("culprit", seed=4, prompt="a yellow school bus")


@pytest.fixture
def sd1(tiny: Callable[[str], StepPipeline]) -> StepPipeline:
    return tiny("sd1")  # PNDM: a solver with a history, which a step run twice would spoil


async def draw_beside_the_culprit(faulty: Wrapped) -> ErrorInfo:
    """Draws all, checks the neighbours' pictures, and returns how the culprit ended."""
    outcomes = await draw_together(faulty, {0: [GOOD[0], CULPRIT], 1: GOOD[1:]})
    for member in GOOD:
        picture = outcomes[member.request_id]
        assert isinstance(picture, Image.Image), picture
        assert worst_difference(picture, known_solo(faulty.inner, member.params)) <= 1
    ended = outcomes[CULPRIT.request_id]
    assert isinstance(ended, ErrorInfo)
    return ended


async def test_a_failure_in_preparation(sd1: StepPipeline) -> None:
    class Faulty(Wrapped):
        def prepare_encode(self, request: Any, *encoded: Any) -> DiffusionRequestState:
            if request.request_id == "culprit":
                raise ValueError("odd size")
            return self.inner.prepare_encode(request, *encoded)

    error = await draw_beside_the_culprit(Faulty(sd1))
    assert (error.code, error.message) == ("generation_failed", "preparing the request failed: ValueError: odd size")


async def test_a_failure_in_the_refusal_of_a_request(sd1: StepPipeline) -> None:
    faulty = Wrapped(sd1)

    def prompts(request: Any) -> Any:
        if request.request_id == "culprit":
            raise RequestError(ErrorInfo("invalid_request", "no such thing", "size"))
        return sd1.prompts(request)

    faulty.prompts = prompts
    assert (await draw_beside_the_culprit(faulty)).param == "size"


async def test_a_failure_in_the_shared_call_of_the_text_encoders(sd1: StepPipeline) -> None:
    faulty = Wrapped(sd1)

    def encode_prompts(prompts: Any) -> Any:
        if any(prompt.text == CULPRIT.params.prompt for prompt in prompts):
            raise ValueError("odd prompt")
        return sd1.encode_prompts(prompts)

    faulty.encode_prompts = encode_prompts
    error = await draw_beside_the_culprit(faulty)
    assert (error.code, error.message) == (
        "generation_failed",
        "preparing the request failed: ValueError: odd prompt",
    )


async def test_a_failure_in_the_shared_forward(sd1: StepPipeline) -> None:
    class Faulty(Wrapped):
        def denoise_step(self, input_batch: StepInputBatch) -> Sequence[torch.Tensor]:
            if any(state.request_id == "culprit" and state.step_index == 2 for state in input_batch.states):
                raise RuntimeError("poison\nwith a second line")
            return self.inner.denoise_step(input_batch)

    error = await draw_beside_the_culprit(Faulty(sd1))
    assert (error.code, error.message) == ("generation_failed", "the denoiser failed: RuntimeError: poison")


async def test_a_failure_in_the_solver(sd1: StepPipeline) -> None:
    class Faulty(Wrapped):
        def step_scheduler(
            self, states: Sequence[DiffusionRequestState], noise_preds: Sequence[torch.Tensor]
        ) -> list[torch.Tensor | Exception]:
            latents = self.inner.step_scheduler(states, noise_preds)
            for index, state in enumerate(states):
                if state.request_id == "culprit" and state.step_index == 2:
                    latents[index] = IndexError("out of steps")
            return latents

    error = await draw_beside_the_culprit(Faulty(sd1))
    assert (error.code, error.message) == ("generation_failed", "the solver failed: IndexError: out of steps")


async def test_a_failure_in_decode(sd1: StepPipeline) -> None:
    class Faulty(Wrapped):
        def post_decode(self, state: DiffusionRequestState) -> Image.Image:
            if state.request_id == "culprit":
                raise RequestError(ErrorInfo("content_policy_violation", "no"))
            return self.inner.post_decode(state)

    assert (await draw_beside_the_culprit(Faulty(sd1))).code == "content_policy_violation"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_latents_that_are_not_numbers(sd1: StepPipeline, value: float) -> None:
    class Faulty(Wrapped):
        def step_scheduler(
            self, states: Sequence[DiffusionRequestState], noise_preds: Sequence[torch.Tensor]
        ) -> list[torch.Tensor | Exception]:
            latents = self.inner.step_scheduler(states, noise_preds)
            for state, new in zip(states, latents, strict=True):
                if state.request_id == "culprit" and state.step_index == 2:
                    new[0, 0, 0, 0] = value  # type: ignore[index]
            return latents

    assert (await draw_beside_the_culprit(Faulty(sd1))).code == "non_finite"


async def test_a_picture_that_is_not_numbers_is_an_error_and_not_black(pipeline: StepPipeline) -> None:
    class Faulty(Wrapped):
        def post_decode(self, state: DiffusionRequestState) -> Image.Image:
            if state.request_id == "culprit":
                state.latents = torch.full_like(state.latents, float("nan"))
            return self.inner.post_decode(state)

    assert (await draw_beside_the_culprit(Faulty(pipeline))).code == "non_finite"


async def test_a_group_that_does_not_fit_is_split(sd1: StepPipeline) -> None:
    class Tight(Wrapped):
        def denoise_step(self, input_batch: StepInputBatch) -> Sequence[torch.Tensor]:
            if input_batch.rows > 3:
                raise torch.OutOfMemoryError("no room for four rows")
            return self.inner.denoise_step(input_batch)

    outcomes = await draw_together(Tight(sd1), {0: GOOD})
    for member in GOOD:
        picture = outcomes[member.request_id]
        assert isinstance(picture, Image.Image)
        assert worst_difference(picture, known_solo(sd1, member.params)) <= 1


async def test_a_request_that_does_not_fit_alone_ends_as_out_of_memory(sd1: StepPipeline) -> None:
    class Faulty(Wrapped):
        def denoise_step(self, input_batch: StepInputBatch) -> Sequence[torch.Tensor]:
            if any(state.request_id == "culprit" for state in input_batch.states):
                raise torch.OutOfMemoryError("no room")
            return self.inner.denoise_step(input_batch)

    assert (await draw_beside_the_culprit(Faulty(sd1))).code == "out_of_memory"


def test_no_room_for_the_look_at_the_latents_ends_the_requests_and_not_the_worker(
    sd1: StepPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(FiniteWatch, "check", no_room)
    runner = StepRunner(sd1)
    with torch.inference_mode():
        states = [prepared(sd1, member) for member in GOOD]
        for state in states:
            runner.add(state)
        outcome = runner.run_group(states)
    assert [(state, error.code) for state, error in outcome.failed] == [(state, "out_of_memory") for state in states]
    assert outcome.advanced == []


def test_a_device_that_breaks_in_a_solver_ends_the_worker_and_no_request(sd1: StepPipeline) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    runner = StepRunner(sd1)
    with torch.inference_mode():
        state = prepared(sd1, CULPRIT)
        state.scheduler.step = broken
        runner.add(state)
        with pytest.raises(torch.AcceleratorError):
            runner.run_group([state])


def test_a_failed_request_is_let_go_of(sd1: StepPipeline) -> None:
    class Faulty(Wrapped):
        def denoise_step(self, input_batch: StepInputBatch) -> Sequence[torch.Tensor]:
            raise RuntimeError("always")

    runner = StepRunner(Faulty(sd1))
    with torch.inference_mode():
        state = prepared(sd1, CULPRIT)
        runner.add(state)
        outcome = runner.run_group([state])
    assert [failed for failed, _ in outcome.failed] == [state]
    assert (outcome.rows, outcome.advanced) == (2, [])
    assert runner.get("culprit") is None
    assert state.step_index == 0


def test_a_checkpoints_safety_checker_refuses_instead_of_blackening(
    sd1: StepPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe: Any = sd1._pipe  # type: ignore[attr-defined]
    monkeypatch.setattr(pipe, "run_safety_checker", lambda image, device, dtype: (torch.zeros_like(image), [True]))
    with torch.inference_mode(), pytest.raises(RequestError) as refused:
        sd1.post_decode(prepared(sd1, CULPRIT))
    assert refused.value.info.code == "content_policy_violation"


def test_a_broken_device_ends_the_worker_and_no_single_request(sd1: StepPipeline) -> None:
    """Every later call on the device would fail: a worker that went on would fail all that it is given."""

    class Broken(Wrapped):
        def denoise_step(self, input_batch: StepInputBatch) -> Sequence[torch.Tensor]:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    runner = StepRunner(Broken(sd1))
    state = prepared(sd1, CULPRIT)
    runner.add(state)
    with pytest.raises(torch.AcceleratorError):
        runner.run_group([state])


def test_memory_is_given_back_only_when_the_failed_forward_holds_none(
    sd1: StepPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Activation:
        pass

    held: list[weakref.ref[Activation]] = []

    class TooLarge(Wrapped):
        def denoise_step(self, input_batch: StepInputBatch) -> Sequence[torch.Tensor]:
            if input_batch.requests > 1:
                activation = Activation()
                held.append(weakref.ref(activation))
                raise torch.OutOfMemoryError("CUDA out of memory")
            return self.inner.denoise_step(input_batch)

    alive: list[bool] = []
    monkeypatch.setattr(halving, "release_cached_memory", lambda device: alive.append(held[-1]() is not None))
    runner = StepRunner(TooLarge(sd1))
    states = [prepared(sd1, member) for member in GOOD[:2]]
    for state in states:
        runner.add(state)
    with torch.inference_mode():
        outcome = runner.run_group(states)
    assert len(outcome.advanced) == 2
    assert alive == [False]
