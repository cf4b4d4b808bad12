"""Solver and schedule as a client asks for them: what is understood, and what is refused before a worker is asked."""

from typing import Any

import pytest
from msgspec.structs import replace

from common.messages import ModelProfile
from common.params import SchedulerSpec
from services.gateway.errors import ApiError
from services.gateway.solver_fields import MAX_OPTIONS, Schedule, schedule
from tests.builders import profile

PROFILE = profile(
    accepts=("scheduler", "sigmas", "timesteps"),
    schedulers=("PNDMScheduler", "DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler"),
)
ABSENT = Schedule(num_inference_steps=20, scheduler=None, sigmas=None, timesteps=None)


def refusal(body: dict[str, Any], of: ModelProfile = PROFILE) -> ApiError:
    with pytest.raises(ApiError) as refused:
        schedule(body, of)
    assert (refused.value.status, refused.value.type) == (400, "invalid_request_error")
    return refused.value


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"num_inference_steps": 20},
        {"scheduler": None, "sigmas": None, "timesteps": None},
        {"scheduler": "PNDMScheduler"},
        {"scheduler": {"name": "PNDMScheduler"}},
        {"scheduler": {"name": "PNDMScheduler", "options": {}}},
        {"scheduler": {"name": "PNDMScheduler", "options": {"skip_prk_steps": None}}},
    ],
    ids=str,
)
def test_explicit_defaults_equal_absent_fields(body: dict[str, Any]) -> None:
    assert schedule(body, PROFILE) == ABSENT


def test_another_solver_is_asked_for_by_its_name() -> None:
    assert schedule({"scheduler": "DDIMScheduler"}, PROFILE).scheduler == SchedulerSpec("DDIMScheduler")


def test_options_are_the_same_in_any_order() -> None:
    one = {
        "name": "DDIMScheduler",
        "options": {"timestep_spacing": "trailing", "clip_sample": False, "steps_offset": 1},
    }
    other = {"options": dict(reversed(one["options"].items())), "name": "DDIMScheduler"}  # type: ignore[attr-defined]
    asked = schedule({"scheduler": one}, PROFILE).scheduler
    assert asked == schedule({"scheduler": other}, PROFILE).scheduler
    assert asked is not None
    assert dict(asked.options) == one["options"]


def test_the_default_solver_with_an_option_is_another() -> None:
    asked = schedule({"scheduler": {"name": "PNDMScheduler", "options": {"skip_prk_steps": False}}}, PROFILE)
    assert asked.scheduler == SchedulerSpec("PNDMScheduler", (("skip_prk_steps", False),))


@pytest.mark.parametrize("field", ["sigmas", "timesteps"])
def test_a_list_is_the_schedule_and_tells_the_number_of_steps(field: str) -> None:
    asked = schedule({field: [14, 6.5, 0]}, PROFILE)
    assert (getattr(asked, field), asked.num_inference_steps) == ((14.0, 6.5, 0.0), 3)
    assert schedule({field: [14, 6.5, 0], "num_inference_steps": 3}, PROFILE) == asked


@pytest.mark.parametrize(
    ("body", "param", "fragment"),
    [
        ({"scheduler": "DPM++ 2M Karras"}, "scheduler", "did you mean 'DPMSolverMultistepScheduler'?"),
        ({"scheduler": "PLMS"}, "scheduler", "did you mean 'PNDMScheduler'?"),
        ({"scheduler": ["DDIMScheduler"]}, "scheduler", "an object with name and options"),
        ({"scheduler": "DDIM"}, "scheduler", "did you mean 'DDIMScheduler'?"),
        ({"scheduler": "eulerdiscrete"}, "scheduler", "did you mean 'EulerDiscreteScheduler'?"),
        ({"scheduler": "DPMSolver"}, "scheduler", "did you mean 'DPMSolverMultistepScheduler'?"),
        ({"scheduler": "DPMSolvrMultistep"}, "scheduler", "did you mean 'DPMSolverMultistepScheduler'?"),
        ({"scheduler": "zzz"}, "scheduler", "known are: PNDMScheduler, DDIMScheduler"),
        ({"scheduler": 3}, "scheduler", "must be a name, or an object"),
        ({"scheduler": ["DDIMScheduler"]}, "scheduler", "must be a name, or an object"),
        ({"scheduler": ""}, "scheduler.name", "scheduler.name is required"),
        ({"scheduler": {}}, "scheduler.name", "scheduler.name is required"),
        ({"scheduler": {"name": 3}}, "scheduler.name", "must be a string"),
        ({"scheduler": {"name": "DDIMScheduler", "eta": 1}}, "scheduler", "own settings go into its options"),
        ({"scheduler": {"name": "DDIMScheduler", "options": []}}, "scheduler.options", "must be an object"),
        (
            {"scheduler": {"name": "DDIMScheduler", "options": {str(n): 1 for n in range(MAX_OPTIONS + 1)}}},
            "scheduler.options",
            "32 is the most",
        ),
        (
            {"scheduler": {"name": "DDIMScheduler", "options": {"trained_betas": [0.1]}}},
            "scheduler.options.trained_betas",
            "not an array",
        ),
        (
            {"scheduler": {"name": "DDIMScheduler", "options": {"beta_end": float("nan")}}},
            "scheduler.options.beta_end",
            "a finite number",
        ),
        (
            {"scheduler": {"name": "DDIMScheduler", "options": {"steps_offset": 10**5000}}},
            "scheduler.options.steps_offset",
            "too many digits",
        ),
        ({"scheduler": {"name": "DDIMScheduler", "options": {"x" * 10_000: 1}}}, "scheduler.options", "has no option"),
        ({"scheduler": {"name": "DDIMScheduler", "options": {"\ud800": 1}}}, "scheduler.options", "has no option"),
        ({"sigmas": [1.0, 0.5], "timesteps": [999, 500]}, "timesteps", "not both"),
        ({"sigmas": [1.0, 0.5], "num_inference_steps": 3}, "num_inference_steps", "is 3, but sigmas has 2 values"),
        ({"sigmas": []}, "sigmas", "must be an array of numbers"),
        ({"sigmas": 1.0}, "sigmas", "must be an array of numbers"),
        ({"sigmas": [1.0, None]}, "sigmas[1]", "not null"),
        ({"sigmas": [1.0, "0.5"]}, "sigmas[1]", "must be a number"),
        ({"sigmas": [float("inf"), 1.0]}, "sigmas[0]", "finite number"),
        ({"sigmas": [1.0, -0.1]}, "sigmas[1]", "from 0"),
        ({"timesteps": [0, 500, 999]}, "timesteps[1]", "must fall from one to the next"),
        ({"timesteps": [999, 999]}, "timesteps[1]", "must fall from one to the next"),
        ({"timesteps": list(range(300, 0, -1))}, "timesteps", "200 is the most"),
    ],
    ids=map(str, range(100)),
)
def test_what_makes_no_sense_is_refused_with_what_would(body: dict[str, Any], param: str, fragment: str) -> None:
    error = refusal(body)
    assert error.param == param
    assert fragment in error.message
    assert len(error.message) < 600


@pytest.mark.parametrize("field", ["scheduler", "sigmas", "timesteps"])
def test_a_field_that_the_model_does_not_heed_is_refused(field: str) -> None:
    values = {"scheduler": "DDIMScheduler", "sigmas": [1.0], "timesteps": [999]}
    heeds = tuple(name for name in values if name != field)
    assert refusal({field: values[field]}, replace(PROFILE, accepts=heeds)).param == field
    assert schedule({field: None}, replace(PROFILE, accepts=heeds)) == ABSENT
