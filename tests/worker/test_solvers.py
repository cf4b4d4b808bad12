"""Every solver that a family offers draws what diffusers draws with it alone, whoever is stepped beside it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import EDMEulerScheduler, FlowMatchEulerDiscreteScheduler
from PIL import Image

from common.errors import ErrorInfo, RequestError
from common.params import DiffusionRequest, SamplingParams, SchedulerSpec
from services.worker.pipelines import solver_options, solvers
from services.worker.pipelines.protocol import StepPipeline
from services.worker.pipelines.solvers_together import solve_together
from tests.worker.driving import draw_together, prepared, request
from tests.worker.solo import diffusers_pipeline, known_solo, worst_difference


def spec(name: str, **options: Any) -> SchedulerSpec:
    return SchedulerSpec(name, tuple(sorted(options.items())))


# Where it clips by default, on random weights that magnifies rounding until pictures differ.
UNCLIPPED = {
    name: {"clip_sample": False}
    for name in ("DDIMScheduler", "DDIMParallelScheduler", "DDPMScheduler", "DDPMParallelScheduler")
}
SIGMAS = (14.6, 6.5, 3.9, 1.4, 0.4, 0.0)
FLOW_SIGMAS = (1.0, 0.9, 0.7, 0.4, 0.2)
TIMESTEPS = (999, 845, 587, 310, 116)

# The checkpoint, the solver, and what else is said of the steps.
CASES: list[tuple[str, SchedulerSpec | None, dict[str, Any]]] = [
    *(("sd1", spec(name, **UNCLIPPED.get(name, {})), {}) for name in solver_options.BETA_SOLVERS),
    *(("sd3", spec(name), {}) for name in solver_options.FLOW_SOLVERS),
    # With options
    ("sd1", spec("PNDMScheduler", skip_prk_steps=False), {}),
    ("sd1", spec("EulerDiscreteScheduler", use_karras_sigmas=True), {}),
    ("sd1", spec("EulerDiscreteScheduler", timestep_spacing="trailing", steps_offset=0), {}),
    ("sd1", spec("LMSDiscreteScheduler", use_beta_sigmas=True), {}),
    ("sd1", spec("DPMSolverMultistepScheduler", algorithm_type="sde-dpmsolver++", use_karras_sigmas=True), {}),
    ("sd1", spec("DPMSolverMultistepScheduler", solver_order=3, final_sigmas_type="sigma_min"), {}),
    ("sd1", spec("DPMSolverSDEScheduler", noise_sampler_seed=5), {}),
    ("sd1", spec("DDIMScheduler", thresholding=True), {}),
    ("sd2", spec("DPMSolverMultistepScheduler", rescale_betas_zero_snr=True, timestep_spacing="trailing"), {}),
    ("sd3", spec("FlowMatchEulerDiscreteScheduler", stochastic_sampling=True), {}),
    ("sd3", spec("FlowMatchEulerDiscreteScheduler", use_dynamic_shifting=True), {}),
    ("sd3", spec("UniPCMultistepScheduler", use_dynamic_shifting=True, solver_order=3), {}),
    ("sd3", spec("DPMSolverMultistepScheduler", algorithm_type="sde-dpmsolver++", flow_shift=3), {}),
    # With a schedule
    ("sd1", spec("EulerDiscreteScheduler"), {"sigmas": SIGMAS}),
    *(
        ("sd1", spec(name, **UNCLIPPED.get(name, {})), {"timesteps": TIMESTEPS})
        for name in ("EulerDiscreteScheduler", "DDPMScheduler", "HeunDiscreteScheduler", "LCMScheduler")
    ),
    ("sd3", None, {"sigmas": FLOW_SIGMAS}),
    ("sd3", spec("UniPCMultistepScheduler"), {"sigmas": FLOW_SIGMAS}),
    # Of other families one that draws noise and one that has a history, where there are.
    ("sdxl", spec("EulerAncestralDiscreteScheduler"), {}),
    ("pixart", spec("DPMSolverMultistepScheduler"), {}),
    ("flux", spec("FlowMatchLCMScheduler"), {}),
    ("flux", spec("DPMSolverMultistepScheduler"), {}),
    ("flux", None, {"sigmas": FLOW_SIGMAS}),
    ("flux2-klein", spec("UniPCMultistepScheduler"), {}),
    ("flux2-klein", spec("FlowMatchEulerDiscreteScheduler", stochastic_sampling=True), {"sigmas": FLOW_SIGMAS}),
    ("qwen-image", spec("UniPCMultistepScheduler"), {"sigmas": FLOW_SIGMAS}),
    ("qwen-image", spec("FlowMatchLCMScheduler"), {}),
    ("z-image", spec("FlowMatchLCMScheduler"), {"sigmas": FLOW_SIGMAS}),
    ("wan", spec("FlowMatchEulerDiscreteScheduler"), {}),
    ("wan", spec("DPMSolverMultistepScheduler", algorithm_type="sde-dpmsolver++"), {}),
]
OTHERS = {"sd1": spec("EulerAncestralDiscreteScheduler"), "sd3": spec("FlowMatchHeunDiscreteScheduler")}


def crowd(name: str, scheduler: SchedulerSpec | None, schedule: dict[str, Any]) -> dict[int, list[DiffusionRequest]]:
    """Two with this solver at different steps, and one with another."""
    steps = len(next(iter(schedule.values()))) if schedule else 5
    asked = {"scheduler": scheduler, "num_inference_steps": steps, **schedule}
    one = request("one", prompt="frog", seed=1, guidance_scale=3.0, height=16, width=16, **asked)
    late = request("late", prompt="blue bicycle", seed=2, guidance_scale=1.0, height=16, width=16, **asked)
    other = request("other", seed=3, height=16, width=16, scheduler=OTHERS.get(name), num_inference_steps=4)
    return {0: [one, other], 2: [late]}


@pytest.mark.parametrize(("name", "scheduler", "schedule"), CASES, ids=str)
async def test_a_picture_is_that_of_the_same_solver_alone(
    tiny: Callable[[str], StepPipeline],
    name: str,
    scheduler: SchedulerSpec | None,
    schedule: dict[str, Any],
) -> None:
    joins = crowd(name, scheduler, schedule)
    outcomes = await draw_together(tiny(name), joins)
    for member in [member for members in joins.values() for member in members]:
        picture = outcomes[member.request_id]
        assert isinstance(picture, Image.Image), picture
        assert worst_difference(picture, known_solo(tiny(name), member.params)) <= 1, member.request_id


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [
        ("sd1", spec("EulerDiscreteScheduler")),
        ("sd1", spec("DDIMScheduler", clip_sample=False)),
        ("sd2", None),
        ("sd3", None),
    ],
    ids=str,
)
async def test_and_where_several_are_stepped_as_one(
    tiny: Callable[[str], StepPipeline],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    scheduler: SchedulerSpec | None,
) -> None:
    together = []

    def watched(*arguments: Any) -> dict[int, torch.Tensor]:
        solved = solve_together(*arguments)
        together.append(len(solved))
        return solved

    monkeypatch.setattr(solvers, "solve_together", watched)
    members = [
        request(str(index), seed=index, height=16, width=16, scheduler=scheduler, num_inference_steps=4 + index)
        for index in range(5)
    ]
    outcomes = await draw_together(tiny(name), {0: members[:3], 1: members[3:]})
    assert max(together) == 5
    for member in members:
        picture = outcomes[member.request_id]
        assert isinstance(picture, Image.Image), picture
        assert worst_difference(picture, known_solo(tiny(name), member.params)) <= 1, member.request_id


def refusal(pipeline: StepPipeline, **changes: Any) -> ErrorInfo:
    with pytest.raises(RequestError) as refused:
        prepared(pipeline, request("r", **changes))
    assert refused.value.info.code == "invalid_request"
    return refused.value.info


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (
            spec("FlowMatchEulerDiscreteScheduler"),
            "can't be used with 'FlowMatchEulerDiscreteScheduler'; known are PNDM",
        ),
        (spec("EDMEulerScheduler"), "can't be used with 'EDMEulerScheduler'"),
        (spec("SchedulerMixin"), "can't be used with 'SchedulerMixin'"),
        (spec("DDIMScheduler", clip=True), "DDIMScheduler has no option 'clip'; known are beta_start, beta_end"),
        (spec("DDIMScheduler", num_train_timesteps=10**9), "has no option 'num_train_timesteps'"),
        (spec("DDIMScheduler", trained_betas="0.1"), "has no option 'trained_betas'"),
        (spec("UniPCMultistepScheduler", solver_p="DDIMScheduler"), "has no option 'solver_p'"),
        (
            spec("EulerDiscreteScheduler", use_karras_sigmas="yes"),
            "wants true or false for use_karras_sigmas, not 'yes'",
        ),
        (spec("EulerDiscreteScheduler", use_karras_sigmas=1), "wants true or false for use_karras_sigmas, not 1"),
        (spec("EulerDiscreteScheduler", sigma_max=True), "wants a number for sigma_max, not True"),
        (spec("DDIMScheduler", steps_offset=0.5), "wants an integer for steps_offset, not 0.5"),
        (spec("DDIMScheduler", beta_schedule=1), "wants a string for beta_schedule, not 1"),
        (spec("DDIMScheduler", timestep_spacing="wide"), "knows for timestep_spacing leading, trailing, linspace"),
        (spec("EulerAncestralDiscreteScheduler", prediction_type="x"), "knows for prediction_type epsilon, sample"),
        (spec("DPMSolverMultistepScheduler", solver_order=10**9), "can have a solver_order from 1 to 4"),
        # What only diffusers knows: as the solver is made, is given its schedule, or goes through it.
        (spec("EulerDiscreteScheduler", use_karras_sigmas=True, use_beta_sigmas=True), "Only one of"),
        (spec("DDIMScheduler", beta_schedule="wide"), "wide is not implemented"),
        (spec("EulerDiscreteScheduler", interpolation_type="cubic"), "cubic is not implemented"),
        (spec("DDIMScheduler", steps_offset=500), "timesteps of its schedule go from"),
        (spec("EulerDiscreteScheduler", beta_start=-1.0), "can't be used so"),
        (spec("EulerDiscreteScheduler", steps_offset=5000), "timesteps of its schedule go from"),
        (spec("EulerDiscreteScheduler", steps_offset=10**300), "can't be used so"),
        (spec("DDIMScheduler", clip_sample_range=1e300), "can't be used so"),
        (spec("DPMSolverMultistepScheduler", thresholding=True, dynamic_thresholding_ratio=5.0), "can't be used so"),
        (spec("DPMSolverSDEScheduler", beta_start=0.0, beta_end=0.0), "can't be used so"),
        # torchsde would go on for ever.
        (spec("DPMSolverSDEScheduler", beta_end=0.9), "of its schedule are not numbers"),
        (spec("DPMSolverSDEScheduler", beta_end=5.5), "can't be used so"),
        (spec("UniPCMultistepScheduler", solver_type="bh1"), "its steps give values that are not numbers"),
    ],
    ids=str,
)
def test_a_solver_that_cannot_be_had_so_is_refused_with_what_can(
    tiny: Callable[[str], StepPipeline], scheduler: SchedulerSpec, message: str
) -> None:
    info = refusal(tiny("sd1"), scheduler=scheduler)
    assert info.param == "scheduler"
    assert message in info.message


@pytest.mark.parametrize(
    ("name", "changes", "param", "message"),
    [
        ("sd1", {"sigmas": SIGMAS}, "sigmas", "PNDMScheduler takes no sigmas"),
        ("sd1", {"timesteps": TIMESTEPS}, "timesteps", "PNDMScheduler takes no timesteps"),
        ("sd1", {"scheduler": spec("LCMScheduler"), "num_inference_steps": 51}, "scheduler", "is smaller than"),
        ("sd1", {"scheduler": spec("EulerDiscreteScheduler"), "sigmas": (14.6,)}, "sigmas", "there is no step in it"),
        ("sd1", {"scheduler": spec("DDPMScheduler"), "timesteps": (1000, 500)}, "timesteps", "must start before"),
        (
            "sd1",
            {"scheduler": spec("HeunDiscreteScheduler", use_karras_sigmas=True), "timesteps": TIMESTEPS},
            "timesteps",
            "Cannot use `timesteps` with",
        ),
        (
            "sd3",
            {"scheduler": spec("DDIMScheduler")},
            "scheduler",
            "can't be used with 'DDIMScheduler'; known are Flow",
        ),
        ("sd3", {"scheduler": spec("SASolverScheduler"), "sigmas": FLOW_SIGMAS}, "sigmas", "takes no sigmas"),
        # diffusers' call would not heed these sigmas, and say nothing.
        (
            "flux",
            {"scheduler": spec("UniPCMultistepScheduler"), "sigmas": FLOW_SIGMAS},
            "sigmas",
            "makes its own sigmas",
        ),
    ],
    ids=str,
)
def test_a_schedule_that_the_solver_cannot_follow_is_refused(
    tiny: Callable[[str], StepPipeline], name: str, changes: dict[str, Any], param: str, message: str
) -> None:
    values = changes.get("sigmas") or changes.get("timesteps")
    info = refusal(tiny(name), **({"num_inference_steps": len(values)} if values else {}) | changes)
    assert info.param == param
    assert message in info.message


def test_every_solver_is_offered_where_the_call_tells_it_no_more_than_the_number_of_steps(
    tiny: Callable[[str], StepPipeline],
) -> None:
    for name, own, known in (
        ("sd1", "PNDMScheduler", solver_options.BETA_SOLVERS),
        ("sd3", "FlowMatchEulerDiscreteScheduler", solver_options.FLOW_SOLVERS),
        ("wan", "UniPCMultistepScheduler", solver_options.FLOW_SOLVERS),
    ):
        offered = tiny(name).profile("m", 50).schedulers
        assert offered[0] == own
        assert sorted(offered) == sorted(known)


def test_a_solver_that_the_familys_call_cannot_use_is_not_offered(tiny: Callable[[str], StepPipeline]) -> None:
    takes_sigmas_and_mu = {"FlowMatchEulerDiscreteScheduler", "FlowMatchLCMScheduler"}
    assert set(tiny("z-image").profile("m", 50).schedulers) == takes_sigmas_and_mu
    assert set(tiny("qwen-image").profile("m", 50).schedulers) == takes_sigmas_and_mu | {"UniPCMultistepScheduler"}
    assert "FlowMatchHeunDiscreteScheduler" not in tiny("flux").profile("m", 50).schedulers


def test_with_a_solver_of_a_kind_of_its_own_no_other_is_offered() -> None:
    own = EDMEulerScheduler()
    assert solvers.offered_schedulers(own) == ("EDMEulerScheduler",)


def test_a_dynamic_shift_is_heeded_by_a_solver_that_was_made_for_noise() -> None:
    shifted = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    plain = FlowMatchEulerDiscreteScheduler()

    def schedule(scheduler: Any, params: SamplingParams) -> torch.Tensor:
        return solvers.set_timesteps(scheduler, params, torch.device("cpu"), mu=0.9)

    assert "DPMSolverMultistepScheduler" in solvers.offered_schedulers(shifted, schedule)
    assert "DPMSolverMultistepScheduler" not in solvers.offered_schedulers(plain, schedule)  # it refuses a shift


@pytest.mark.parametrize("steps", [1, 2, 3, 50])
def test_every_solver_takes_any_number_of_steps(tiny: Callable[[str], StepPipeline], steps: int) -> None:
    for name in ("sd1", "sd3"):
        pipe = diffusers_pipeline(tiny(name))
        for solver in tiny(name).profile("m", 50).schedulers:
            params = request("r", num_inference_steps=steps, scheduler=spec(solver)).params
            scheduler = solvers.with_own_scheduler(pipe, params).scheduler
            assert len(solvers.set_timesteps(scheduler, params, torch.device("cpu"))) >= steps


def test_noise_of_a_solver_with_a_generator_of_its_own_comes_from_the_requests_seed(
    tiny: Callable[[str], StepPipeline],
) -> None:
    scheduler = spec("DPMSolverSDEScheduler")
    seeds = [prepared(tiny("sd1"), request("r", seed=seed, scheduler=scheduler)).scheduler for seed in (7, 8)]
    assert [each.noise_sampler_seed for each in seeds] == [7, 8]


def test_requests_with_the_same_solver_share_nothing_of_it(tiny: Callable[[str], StepPipeline]) -> None:
    asked = {"scheduler": spec("UniPCMultistepScheduler")}
    one, other = (prepared(tiny("sd1"), request(name, **asked)) for name in "ab")
    solvers.solve([one], [torch.ones_like(one.latents)])
    assert (one.scheduler.step_index, other.scheduler.step_index) == (1, None)
    assert other.scheduler.model_outputs == [None, None]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (spec("EulerDiscreteScheduler", use_karras_sigmas=True), spec("EulerDiscreteScheduler", use_karras_sigmas=1)),
        (spec("DPMSolverMultistepScheduler", solver_order=1), spec("DPMSolverMultistepScheduler", solver_order=True)),
    ],
)
def test_what_is_refused_does_not_depend_on_what_others_asked_before(
    tiny: Callable[[str], StepPipeline], right: SchedulerSpec, wrong: SchedulerSpec
) -> None:
    """To Python True is equal to 1."""
    prepared(tiny("sd1"), request("first", scheduler=right))
    assert refusal(tiny("sd1"), scheduler=wrong).param == "scheduler"


def test_a_number_of_steps_that_a_checkpoint_can_not_make_is_the_requests_fault(
    tiny: Callable[[str], StepPipeline],
) -> None:
    """Qwen-Image's schedule is stretched to a given end, which of a single step is 0 / 0."""
    info = refusal(tiny("qwen-image"), num_inference_steps=1)
    assert (info.param, "not numbers" in info.message) == ("num_inference_steps", True)


def test_a_solver_with_options_is_tried_once_for_all_pictures_of_a_call(
    tiny: Callable[[str], StepPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []
    rehearse = solvers._rehearse
    monkeypatch.setattr(solvers, "_rehearse", lambda trial: (tried.append(trial), rehearse(trial)))
    asked = spec("LMSDiscreteScheduler", use_karras_sigmas=True, beta_end=0.0123)
    for seed in range(3):
        prepared(tiny("sd1"), request("r", scheduler=asked, seed=seed))
    prepared(tiny("sd1"), request("r", scheduler=asked, num_inference_steps=7))
    assert len(tried) == 2
