"""How a picture's equation is solved: the solver, and the steps that it takes.

Role: `num_inference_steps`, `scheduler`, `sigmas` and `timesteps`, judged against the model's profile. What a solver's
options mean, and which of them go together, only the worker knows, which answers for it.
"""

import difflib
import math
from typing import Any

from msgspec import Struct

from common.messages import ModelProfile
from common.params import SchedulerSpec
from services.gateway.errors import invalid
from services.gateway.fields import Body, integer, number, shown, text

MAX_OPTIONS = 32
MAX_OPTION_INTEGER = 2**63 - 1
MAX_SIGMA = 1e6
_MAX_NAME_CHARS = 128


# What other programs call them, the longer names first.
_OTHER_NAMES = {
    "euler a": "EulerAncestralDiscreteScheduler",
    "dpm++ 2s": "DPMSolverSinglestepScheduler",
    "dpm++ sde": "DPMSolverSDEScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
    "dpm2 a": "KDPM2AncestralDiscreteScheduler",
    "dpm2": "KDPM2DiscreteScheduler",
    "plms": "PNDMScheduler",
}


class Schedule(Struct, frozen=True):
    """The steps of a request, as `SamplingParams` has them."""

    num_inference_steps: int
    scheduler: SchedulerSpec | None
    sigmas: tuple[float, ...] | None
    timesteps: tuple[float, ...] | None


def schedule(body: Body, profile: ModelProfile) -> Schedule:
    """What `body` says of solver and steps."""
    steps = integer(body, "num_inference_steps", 1, profile.max_num_inference_steps)
    lists = {name: _falling(body, name, profile) for name in ("sigmas", "timesteps")}
    given = [(name, values) for name, values in lists.items() if values is not None]
    if len(given) > 1:
        raise invalid("timesteps", "give sigmas or timesteps, not both: each is the whole schedule")
    for name, values in given:
        if steps not in (None, len(values)):
            raise invalid(
                "num_inference_steps",
                f"num_inference_steps is {steps}, but {name} has {len(values)} values; leave num_inference_steps out",
            )
        steps = len(values)
    return Schedule(
        num_inference_steps=profile.default_num_inference_steps if steps is None else steps,
        scheduler=_scheduler(body, profile),
        sigmas=lists["sigmas"],
        timesteps=lists["timesteps"],
    )


def _scheduler(body: Body, profile: ModelProfile) -> SchedulerSpec | None:
    """None for the one that the checkpoint names, asked for or not."""
    value = body.get("scheduler")
    if value is None:
        return None
    _refuse_unheeded("scheduler", profile)
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, dict):
        raise invalid("scheduler", "scheduler must be a name, or an object with name and options")
    for key in value:
        if key not in ("name", "options"):
            raise invalid("scheduler", f"scheduler has no {shown(key)}; a solver's own settings go into its options")
    name = text({"scheduler.name": value.get("name")}, "scheduler.name", _MAX_NAME_CHARS)
    if not name:
        raise invalid("scheduler.name", "scheduler.name is required")
    known = profile.schedulers
    if name not in known:
        near = _near(name, known)
        proposal = f"did you mean {near!r}? All are in GET /v1/models" if near else f"known are: {', '.join(known)}"
        raise invalid("scheduler", f"{profile.model} has no scheduler {shown(name)}; {proposal}")
    options = _options(value.get("options"))
    return None if name == known[0] and not options else SchedulerSpec(name, options)


def _near(name: str, known: tuple[str, ...]) -> str | None:
    """The known name that was likely meant. Their common endings are often left out."""
    for start, solver in _OTHER_NAMES.items():
        if name.lower().startswith(start) and solver in known:
            return solver
    stems = {_stem(each): each for each in known}
    wanted = _stem(name)
    near = [stem for stem in stems if wanted and stem.startswith(wanted)] or difflib.get_close_matches(wanted, stems)
    return stems[near[0]] if near else None


def _stem(name: str) -> str:
    return name.lower().removesuffix("scheduler").removesuffix("discrete")


def _options(value: Any) -> tuple[tuple[str, str | int | float | bool], ...]:
    """Sorted by name, so that equal options are equal."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise invalid("scheduler.options", "scheduler.options must be an object")
    if len(value) > MAX_OPTIONS:
        raise invalid("scheduler.options", f"scheduler.options has {len(value)} options; {MAX_OPTIONS} is the most")
    return tuple((name, _option(name, option)) for name, option in sorted(value.items()) if option is not None)


def _option(name: str, value: Any) -> str | int | float | bool:
    if len(name) > _MAX_NAME_CHARS or not name.isascii():
        raise invalid("scheduler.options", f"scheduler.options has no option {shown(name)}")
    field = f"scheduler.options.{name}"
    if isinstance(value, str):
        return text({field: value}, field, _MAX_NAME_CHARS) or ""
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) <= MAX_OPTION_INTEGER:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise invalid(field, f"{field} must be a string, a finite number, true or false, not {_kind_of_option(value)}")


def _kind_of_option(value: Any) -> str:
    # Python refuses to write integers of more than some thousand digits.
    return "a number of too many digits" if isinstance(value, int) else shown(value)


def _falling(body: Body, name: str, profile: ModelProfile) -> tuple[float, ...] | None:
    """The list of numbers under `name`, each below the one before."""
    value = body.get(name)
    if value is None:
        return None
    _refuse_unheeded(name, profile)
    if not isinstance(value, list) or not value:
        raise invalid(name, f"{name} must be an array of numbers, the first of which is the largest")
    most = profile.max_num_inference_steps
    if len(value) > most:
        raise invalid(name, f"{name} has {len(value)} values; {most} is the most")
    found: list[float] = []
    for place, entry in enumerate(value):
        field = f"{name}[{place}]"
        item = number({field: entry}, field, 0.0, MAX_SIGMA)
        if item is None:
            raise invalid(field, f"{field} must be a number, not null")
        if found and item >= found[-1]:
            raise invalid(field, f"{name} must fall from one to the next, but {field} is {item:g} after {found[-1]:g}")
        found.append(item)
    return tuple(found)


def _refuse_unheeded(name: str, profile: ModelProfile) -> None:
    if name not in profile.accepts:
        raise invalid(name, f"{profile.model} has no choice of {name}; leave it out")
