"""Which solver a request gets: its class and its options, judged, and a fresh one made.

Role: a request's `SchedulerSpec` against the solver that the checkpoint came with. It knows no schedules.

A flow model is one that predicts the velocity of rectified flow. Solvers that were made for models that predict noise
know a mode for it, `use_flow_sigmas`; a request that names one need not say so.
"""

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import diffusers
import torch

from common.errors import ErrorInfo, RequestError
from common.params import SamplingParams, SchedulerSpec

# For models that predict noise, velocity or the picture itself on a schedule of betas.
BETA_SOLVERS = (
    "PNDMScheduler",
    "DDIMScheduler",
    "DDIMParallelScheduler",
    "DDPMScheduler",
    "DDPMParallelScheduler",
    "LMSDiscreteScheduler",
    "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
    "HeunDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "DPMSolverSDEScheduler",
    "UniPCMultistepScheduler",
    "DEISMultistepScheduler",
    "SASolverScheduler",
    "LCMScheduler",
    "TCDScheduler",
)
FLOW_SOLVERS = (
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "FlowMatchLCMScheduler",
    "LTXEulerAncestralRFScheduler",
    "UniPCMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "DEISMultistepScheduler",
    "SASolverScheduler",
)
# Options whose default is None. The types are what they are used as; not all of diffusers' annotations are right.
_OPTIONAL_TYPES: dict[str, type] = {
    "sigma_min": float,
    "sigma_max": float,
    "shift_terminal": float,
    "noise_sampler_seed": int,
}
_MODELS_OWN = ("num_train_timesteps",)  # not for a request to change; a large one would also take all memory
_PREDICTION_TYPES = ("epsilon", "sample", "v_prediction")  # where a class does not say which it knows
_MAX_ORDER = 4  # of a multistep solver: it keeps as many predictions, and none is made for more
# What diffusers and torch raise at options and schedules that they can't use.
REFUSALS = (
    ValueError,
    TypeError,
    AssertionError,
    IndexError,
    KeyError,
    ArithmeticError,
    NotImplementedError,
    RuntimeError,
)
_NOBODYS_FAULT = (torch.OutOfMemoryError, torch.AcceleratorError)  # RuntimeErrors that say nothing of the request
_KEPT_PROTOTYPES = 64


def own_solver(checkpoint: Any, params: SamplingParams) -> Any:
    """A fresh solver for one request, beside the one that the checkpoint came with."""
    solver_class, options = _class_and_options(checkpoint, params.scheduler)
    with refused(solver_class, "scheduler"):
        prototype = _prototype(checkpoint, solver_class, tuple(sorted(options.items())))
    solver = copy.deepcopy(prototype)  # to make one can take half a second
    if type(solver).__name__ == "DPMSolverSDEScheduler" and solver.noise_sampler_seed is None:
        solver.noise_sampler_seed = params.seed  # its noise is not drawn from a generator that it is given
    return solver


def is_flow(scheduler: Any) -> bool:
    """Whether the checkpoint that this solver comes with is a flow model."""
    name, config = type(scheduler).__name__, scheduler.config
    solves_nothing_else = name in FLOW_SOLVERS and name not in BETA_SOLVERS
    return solves_nothing_else or bool(config.get("use_flow_sigmas", False))


def known_solvers(checkpoint: Any) -> tuple[str, ...]:
    """Those that may do for a checkpoint that came with this solver."""
    own = type(checkpoint).__name__
    known = FLOW_SOLVERS if is_flow(checkpoint) else BETA_SOLVERS
    return known if own in known else (own,)


def _class_and_options(checkpoint: Any, spec: SchedulerSpec | None) -> tuple[Any, dict[str, Any]]:
    """What to make, and with which changes to the checkpoint's configuration."""
    own_class = type(checkpoint)
    if spec is None:
        return own_class, {}
    if spec.name == own_class.__name__:
        return own_class, _checked_options(own_class, spec)
    solver_class = _solver_class(checkpoint, spec.name)
    return solver_class, _flow_options(checkpoint, solver_class) | _checked_options(solver_class, spec)


@functools.lru_cache(maxsize=_KEPT_PROTOTYPES)
def _prototype(checkpoint: Any, solver_class: Any, options: tuple[tuple[str, Any], ...]) -> Any:
    """A solver that is only copied. The options are of their right types: to the cache True and 1 are the same."""
    return solver_class.from_config(checkpoint.config, **dict(options))


def _solver_class(checkpoint: Any, name: str) -> Any:
    known = known_solvers(checkpoint)
    if name not in known:
        message = f"this model can't be used with {name!r}; known are {', '.join(known)}"
        raise RequestError(ErrorInfo("invalid_request", message, "scheduler"))
    return getattr(diffusers, name)


def _flow_options(checkpoint: Any, solver_class: Any) -> dict[str, Any]:
    """What a class that the checkpoint does not name must be told to solve a flow model."""
    if not is_flow(checkpoint):
        return {}
    shift = checkpoint.config.get("shift", checkpoint.config.get("flow_shift", 1.0))
    options = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": shift, "shift": shift}
    known = parameters(solver_class.__init__)
    return {name: value for name, value in options.items() if name in known}


def _checked_options(solver_class: Any, spec: SchedulerSpec) -> dict[str, Any]:
    """The options of a request, each of its right type. Raises `RequestError` with the known ones."""
    types = _option_types(solver_class)
    checked = {}
    for name, value in spec.options:
        if name not in types:
            raise refusal(solver_class, f"has no option {name!r}; known are {', '.join(types)}", "scheduler")
        checked[name] = _checked(solver_class, name, value, types[name])
    return checked


def _checked(solver_class: Any, name: str, value: Any, wanted: Any) -> Any:
    if isinstance(wanted, tuple):
        if value not in wanted:
            raise refusal(solver_class, f"knows for {name} {', '.join(wanted)}, not {value!r}", "scheduler")
        return value
    if wanted is float and type(value) is int:
        return float(value)
    if wanted is int and type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not wanted:
        kinds = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
        raise refusal(solver_class, f"wants {kinds[wanted]} for {name}, not {value!r}", "scheduler")
    if name.endswith("_order") and not 1 <= value <= _MAX_ORDER:
        raise refusal(solver_class, f"can have a {name} from 1 to {_MAX_ORDER}, not {value}", "scheduler")
    return value


def _option_types(solver_class: Any) -> dict[str, Any]:
    """The options that a request may set: for each its type, or its values where they are known."""
    types: dict[str, Any] = {}
    for name, parameter in parameters(solver_class.__init__).items():
        if name in _MODELS_OWN:
            continue
        if get_origin(parameter.annotation) is Literal and parameter.default is not None:
            types[name] = get_args(parameter.annotation)
        elif name == "prediction_type":
            types[name] = _PREDICTION_TYPES
        elif isinstance(parameter.default, bool | int | float | str):
            types[name] = type(parameter.default)
        elif name in _OPTIONAL_TYPES:
            types[name] = _OPTIONAL_TYPES[name]
    return types


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {name: each for name, each in parameters.items() if name not in ("self", "kwargs")}


@contextlib.contextmanager
def refused(solver: Any, field: str) -> Iterator[None]:
    """What diffusers raises at options and schedules that it can't use is the client's to mend."""
    try:
        yield
    except _NOBODYS_FAULT:
        raise
    except REFUSALS as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise refusal(solver, f"can't be used so: {reason[:300]}", field) from error


def refusal(solver: Any, reason: str, field: str) -> RequestError:
    name = getattr(solver, "__name__", type(solver).__name__)
    return RequestError(ErrorInfo("invalid_request", f"{name} {reason}", field))
