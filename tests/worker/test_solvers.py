"""Every solver that a family offers draws what diffusers draws with it alone, whoever is stepped beside it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image

from common.errors import RequestError
from common.params import DiffusionRequest, SchedulerSpec
from services.worker.pipelines import solvers
from services.worker.pipelines.protocol import StepPipeline
from tests.worker.driving import Outcome, draw_together, prepared, request
from tests.worker.solo import draw_solo, worst_difference


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
    *(("sd1", spec(name, **UNCLIPPED.get(name, {})), {}) for name in solvers.BETA_SOLVERS),
    *(("sd3", spec(name), {}) for name in solvers.FLOW_SOLVERS),
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


def furthest(pipeline: StepPipeline, outcomes: dict[str, Outcome], members: list[DiffusionRequest]) -> int:
    """The worst difference of any member from its solo picture."""
    worst = 0
    for member in members:
        picture = outcomes[member.request_id]
        assert isinstance(picture, Image.Image), picture
        worst = max(worst, worst_difference(picture, draw_solo(pipeline, member.params)))
    return worst


@pytest.mark.parametrize(("name", "scheduler", "schedule"), CASES, ids=str)
async def test_a_picture_is_that_of_the_same_solver_alone(
    tiny: Callable[[str], StepPipeline], name: str, scheduler: SchedulerSpec | None, schedule: dict[str, Any]
) -> None:
    pipeline = tiny(name)
    joins = crowd(name, scheduler, schedule)
    outcomes = await draw_together(pipeline, joins)
    assert furthest(pipeline, outcomes, [member for members in joins.values() for member in members]) <= 1
