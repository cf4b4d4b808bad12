"""A request's own solver: chosen, given its schedule, stepped. Functions only.

Role: what every family does with diffusers' schedulers, which are called solvers here, as Stepweave has a scheduler of
its own. Each request has a solver for itself, since all of them keep state: a multistep one its history, a stochastic
one its noise, drawn from the request's generator. Which solvers a checkpoint can be used with is tried, not listed.

A flow model is one that predicts the velocity of rectified flow. Solvers that were made for models that predict noise
know a mode for it, `use_flow_sigmas`; a request that names one need not say so.
"""

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

import diffusers
import numpy as np
import torch
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import retrieve_timesteps
from msgspec.structs import replace

from common.errors import ErrorInfo, RequestError
from common.params import SamplingParams, SchedulerSpec
from services.worker.pipelines.solvers_together import solve_together
from services.worker.state import DiffusionRequestState

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
# In the sigmas that they are given the last one, usually 0, must be among them. Others add it themselves.
TAKE_LAST_SIGMA = ("EulerDiscreteScheduler", "LTXEulerAncestralRFScheduler")

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
# What diffusers raises at options and schedules that it can't use. Not RuntimeError: that may be the device's.
_REFUSALS = (ValueError, TypeError, AssertionError, IndexError, KeyError, ArithmeticError, NotImplementedError)
_TRIAL = SamplingParams(prompt="", height=0, width=0, num_inference_steps=4, guidance_scale=1.0, seed=0)
_KEPT_PROTOTYPES = 64


def with_own_scheduler(pipe: Any, params: SamplingParams) -> Any:
    """A view of the diffusers pipeline that shares all models but has a fresh solver, as the request and the checkpoint
    configure it.

    The pipeline's own methods (`prepare_latents`, `prepare_extra_step_kwargs`) then read this request's solver.
    Raises `RequestError` for a solver that is not known or not to be had with such options.
    """
    view = copy.copy(pipe)
    view.scheduler = _own_solver(pipe.scheduler, params)
    return view


def set_timesteps(
    scheduler: Any,
    params: SamplingParams,
    device: torch.device,
    sigmas: Any = None,
    unless_flow_sigmas: bool = False,
    **arguments: Any,
) -> torch.Tensor:
    """Gives the request's solver its schedule. Returns (total steps,) timesteps on `device`.

    `sigmas` is what the pipeline's call passes by itself, `arguments` what else it does. `unless_flow_sigmas` says that
    the call passes no sigmas, its own or the request's, to a solver with `use_flow_sigmas`. Raises `RequestError` where
    the solver can't make the schedule that is asked for, or can't go through it.
    """
    field = _schedule_field(params)
    if unless_flow_sigmas and scheduler.config.get("use_flow_sigmas", False):
        if params.sigmas is not None:
            raise _refusal(scheduler, "makes its own sigmas with this model", "sigmas")
        sigmas = None
    asked = _asked_schedule(scheduler, params)
    with _refused(scheduler, field):
        timesteps: torch.Tensor
        schedule = {"sigmas": sigmas, **arguments, **asked}
        timesteps, _ = retrieve_timesteps(scheduler, params.num_inference_steps, device, **schedule)
        if len(timesteps) == 0:
            raise ValueError("there is no step in it")
    if hasattr(scheduler, "set_begin_index"):
        # Else it would look the first timestep up, and within the step loop that would wait for the device. It would
        # find the same, but where that timestep comes twice: then the second, to run out of sigmas at the last step.
        scheduler.set_begin_index(0)
    scheduler.timesteps = timesteps.cpu()  # what is looked up at each step, by timesteps of the CPU
    if (params.scheduler is not None and params.scheduler.options) or asked:
        with _refused(scheduler, field):
            _rehearse(scheduler)
    return timesteps


def step_arguments(scheduler: Any, generator: torch.Generator) -> dict[str, Any]:
    """What the solver's `step` is to be given beside the pipeline's own: the request's generator, where it draws noise.

    Without it the solver would draw from a generator that all requests share. For families whose pipeline has no
    `prepare_extra_step_kwargs`.
    """
    return {"generator": generator} if "generator" in _parameters(scheduler.step) else {}


def offered_schedulers(
    scheduler: Any, schedule: Callable[[Any, SamplingParams], object] | None = None
) -> tuple[str, ...]:
    """The classes that a request may name with this checkpoint, whose own `scheduler` comes first.

    `schedule` gives a solver its timesteps as the family does for a request of any size; by default by nothing but the
    number of steps. What fails there is not offered.
    """
    own = type(scheduler).__name__
    found = [own]
    for name in _known_solvers(scheduler):
        if name == own:
            continue
        params = replace(_TRIAL, scheduler=SchedulerSpec(name))
        try:
            solver = _own_solver(scheduler, params)
            (schedule or _by_steps)(solver, params)
            _rehearse(solver)
        except (RequestError, ImportError, *_REFUSALS):
            continue
        if name in TAKE_LAST_SIGMA and float(solver.sigmas[-1]) != 0:
            continue  # the call's own sigmas lack the last one: noise would be left in the picture
        found.append(name)
    return tuple(found)


def is_flow(scheduler: Any) -> bool:
    """Whether the checkpoint that this solver comes with is a flow model."""
    name, config = type(scheduler).__name__, scheduler.config
    solves_nothing_else = name in FLOW_SOLVERS and name not in BETA_SOLVERS
    return solves_nothing_else or bool(config.get("use_flow_sigmas", False))


def solve(
    states: Sequence[DiffusionRequestState], noise_preds: Sequence[torch.Tensor]
) -> list[torch.Tensor | Exception]:
    """One step of each request's solver: its new latents, or what the solver raised.

    Those that can be computed as one are (`solvers_together.py`); the results are the same.
    """
    solved = solve_together(states, noise_preds)
    return [
        solved[index] if index in solved else solve_one(state, noise_pred)
        for index, (state, noise_pred) in enumerate(zip(states, noise_preds, strict=True))
    ]


def solve_one(state: DiffusionRequestState, noise_pred: torch.Tensor) -> torch.Tensor | Exception:
    """One step of one request's own solver."""
    timestep = state.host_timesteps[state.step_index]
    try:
        latents: torch.Tensor = state.scheduler.step(
            noise_pred, timestep, state.latents, **state.extra_step_kwargs, return_dict=False
        )[0]
    except torch.AcceleratorError:  # the device is broken: that is no request's fault
        raise
    except Exception as error:  # foreign code: whatever it raises ends this request alone
        return error
    return latents.to(state.latents.dtype)


def _own_solver(checkpoint: Any, params: SamplingParams) -> Any:
    """A fresh solver for one request, beside the one that the checkpoint came with."""
    solver_class, options = _class_and_options(checkpoint, params.scheduler)
    with _refused(solver_class, "scheduler", RuntimeError):  # it is made on the CPU, so that is no device's
        prototype = _prototype(checkpoint, solver_class, tuple(sorted(options.items())))
    solver = copy.deepcopy(prototype)  # to make one can take half a second
    if type(solver).__name__ == "DPMSolverSDEScheduler" and solver.noise_sampler_seed is None:
        solver.noise_sampler_seed = params.seed  # its noise is not drawn from a generator that it is given
    return solver


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


def _known_solvers(checkpoint: Any) -> tuple[str, ...]:
    """Those that may do for a checkpoint that came with this solver."""
    own = type(checkpoint).__name__
    known = FLOW_SOLVERS if is_flow(checkpoint) else BETA_SOLVERS
    return known if own in known else (own,)


def _solver_class(checkpoint: Any, name: str) -> Any:
    known = _known_solvers(checkpoint)
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
    known = _parameters(solver_class.__init__)
    return {name: value for name, value in options.items() if name in known}


def _checked_options(solver_class: Any, spec: SchedulerSpec) -> dict[str, Any]:
    """The options of a request, each of its right type. Raises `RequestError` with the known ones."""
    types = _option_types(solver_class)
    checked = {}
    for name, value in spec.options:
        if name not in types:
            raise _refusal(solver_class, f"has no option {name!r}; known are {', '.join(types)}", "scheduler")
        checked[name] = _checked(solver_class, name, value, types[name])
    return checked


def _checked(solver_class: Any, name: str, value: Any, wanted: Any) -> Any:
    if isinstance(wanted, tuple):
        if value not in wanted:
            raise _refusal(solver_class, f"knows for {name} {', '.join(wanted)}, not {value!r}", "scheduler")
        return value
    if wanted is float and type(value) is int:
        return float(value)
    if wanted is int and type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not wanted:
        kinds = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
        raise _refusal(solver_class, f"wants {kinds[wanted]} for {name}, not {value!r}", "scheduler")
    if name.endswith("_order") and not 1 <= value <= _MAX_ORDER:
        raise _refusal(solver_class, f"can have a {name} from 1 to {_MAX_ORDER}, not {value}", "scheduler")
    return value


def _option_types(solver_class: Any) -> dict[str, Any]:
    """The options that a request may set: for each its type, or its values where they are known."""
    types: dict[str, Any] = {}
    for name, parameter in _parameters(solver_class.__init__).items():
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


def _asked_schedule(scheduler: Any, params: SamplingParams) -> dict[str, Any]:
    """The sigmas or timesteps of a request, as the solver's `set_timesteps` takes them; empty where it has none."""
    for field, values in (("timesteps", params.timesteps), ("sigmas", params.sigmas)):
        if values is None:
            continue
        if field not in _parameters(scheduler.set_timesteps):
            raise _refusal(scheduler, f"takes no {field}", field)
        # Some compute with them before they make an array of them, one wants a list.
        as_list = field == "timesteps" or type(scheduler).__name__ in TAKE_LAST_SIGMA
        return {field: list(values) if as_list else np.array(values)}
    return {}


def _schedule_field(params: SamplingParams) -> str:
    """The field of a request to name where its schedule can't be made."""
    for field in ("sigmas", "timesteps", "scheduler"):
        if getattr(params, field) is not None:
            return field
    return "num_inference_steps"


def _rehearse(scheduler: Any) -> None:
    """Goes through all steps with a copy and next to no latents: what fails of the schedule or an option alone, fails
    here, before a step is computed, and is told to be the request's fault."""
    trial = copy.deepcopy(scheduler)
    arguments = step_arguments(trial, torch.Generator().manual_seed(0))
    device = scheduler.sigmas.device if hasattr(scheduler, "sigmas") else None
    sample = torch.ones((1, 1, 2, 2), device=device)
    for timestep in trial.timesteps:
        if hasattr(trial, "scale_model_input"):
            trial.scale_model_input(sample, timestep)
        sample = trial.step(torch.zeros_like(sample), timestep, sample, **arguments, return_dict=False)[0]
    if not bool(torch.isfinite(sample).all()):
        raise ValueError("its steps give values that are not numbers")


def _by_steps(scheduler: Any, params: SamplingParams) -> torch.Tensor:
    return set_timesteps(scheduler, params, torch.device("cpu"))


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {name: each for name, each in parameters.items() if name not in ("self", "kwargs")}


@contextlib.contextmanager
def _refused(solver: Any, field: str, *more: type[Exception]) -> Iterator[None]:
    """What diffusers raises at options and schedules that it can't use is the client's to mend."""
    try:
        yield
    except (*_REFUSALS, *more) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise _refusal(solver, f"can't be used so: {reason[:300]}", field) from error


def _refusal(solver: Any, reason: str, field: str) -> RequestError:
    name = getattr(solver, "__name__", type(solver).__name__)
    return RequestError(ErrorInfo("invalid_request", f"{name} {reason}", field))
