"""A request's own solver: chosen, given its schedule, stepped. Functions only.

Role: what every family does with diffusers' schedulers, which are called solvers here, as Stepweave has a scheduler of
its own. Each request has a solver for itself, since all of them keep state: a multistep one its history, a stochastic
one its noise, drawn from the request's generator. Which solvers a checkpoint can be used with is tried, not listed.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import retrieve_timesteps
from msgspec.structs import replace

from common.errors import RequestError
from common.params import SamplingParams, SchedulerSpec
from services.worker.pipelines.solver_options import REFUSALS, known_solvers, own_solver, parameters, refusal, refused
from services.worker.pipelines.solvers_together import solve_together
from services.worker.state import DiffusionRequestState

# In the sigmas that they are given the last one, usually 0, must be among them. Others add it themselves.
TAKE_LAST_SIGMA = ("EulerDiscreteScheduler", "LTXEulerAncestralRFScheduler")
MAX_SIGMA = 1e5  # far above what models are trained with, up to some 4,000
KEPT_REHEARSALS = 64
_TRIAL = SamplingParams(prompt="", height=0, width=0, num_inference_steps=4, guidance_scale=1.0, seed=0)


def with_own_scheduler(pipe: Any, params: SamplingParams) -> Any:
    """A view of the diffusers pipeline that shares all models but has a fresh solver, as the request and the checkpoint
    configure it.

    The pipeline's own methods (`prepare_latents`, `prepare_extra_step_kwargs`) then read this request's solver.
    Raises `RequestError` for a solver that is not known or not to be had with such options.
    """
    view = copy.copy(pipe)
    view.scheduler = own_solver(pipe.scheduler, params)
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
            raise refusal(scheduler, "makes its own sigmas with this model", "sigmas")
        sigmas = None
    asked = _asked_schedule(scheduler, params)
    with refused(scheduler, field):
        timesteps: torch.Tensor
        schedule = {"sigmas": sigmas, **arguments, **asked}
        timesteps, _ = retrieve_timesteps(scheduler, params.num_inference_steps, device, **schedule)
        _check_schedule(scheduler, timesteps)
    if hasattr(scheduler, "set_begin_index"):
        # Else it would look the first timestep up, and within the step loop that would wait for the device. It would
        # find the same, but where that timestep comes twice: then the second, to run out of sigmas at the last step.
        scheduler.set_begin_index(0)
    scheduler.timesteps = timesteps.cpu()  # what is looked up at each step, by timesteps of the CPU
    if (params.scheduler is not None and params.scheduler.options) or asked:
        with refused(scheduler, field):
            _rehearse_once(_Rehearsal.of(scheduler))
    return timesteps


def resolution_shift(scheduler: Any, image_tokens: int, max_shift: float = 1.15) -> float:
    """mu, the shift of a flow model's timesteps that grows with the picture (Esser et al. 2024, section 5.3.2), as the
    calls of diffusers compute it; `max_shift` is the call's own default. One without `use_dynamic_shifting` ignores it.
    """
    config = scheduler.config
    mu: float = calculate_shift(
        image_tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", max_shift),
    )
    return mu


def step_arguments(scheduler: Any, generator: torch.Generator) -> dict[str, Any]:
    """What the solver's `step` is to be given beside the pipeline's own: the request's generator, where it draws noise.

    Without it the solver would draw from a generator that all requests share. For families whose pipeline has no
    `prepare_extra_step_kwargs`.
    """
    return {"generator": generator} if "generator" in parameters(scheduler.step) else {}


def offered_schedulers(
    scheduler: Any, schedule: Callable[[Any, SamplingParams], object] | None = None
) -> tuple[str, ...]:
    """The classes that a request may name with this checkpoint, whose own `scheduler` comes first.

    `schedule` gives a solver its timesteps as the family does for a request of any size; by default by nothing but the
    number of steps. What fails there is not offered.
    """
    own = type(scheduler).__name__
    found = [own]
    for name in known_solvers(scheduler):
        if name == own:
            continue
        params = replace(_TRIAL, scheduler=SchedulerSpec(name))
        try:
            solver = own_solver(scheduler, params)
            (schedule or _by_steps)(solver, params)
            _rehearse(solver)
        except (RequestError, ImportError, *REFUSALS):
            continue
        if name in TAKE_LAST_SIGMA and float(solver.sigmas[-1]) != 0:
            continue  # the call's own sigmas lack the last one: noise would be left in the picture
        found.append(name)
    return tuple(found)


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


def _asked_schedule(scheduler: Any, params: SamplingParams) -> dict[str, Any]:
    """The sigmas or timesteps of a request, as the solver's `set_timesteps` takes them; empty where it has none."""
    for field, values in (("timesteps", params.timesteps), ("sigmas", params.sigmas)):
        if values is None:
            continue
        if field not in parameters(scheduler.set_timesteps):
            raise refusal(scheduler, f"takes no {field}", field)
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


def _check_schedule(scheduler: Any, timesteps: torch.Tensor) -> None:
    """Raises `ValueError` for what no model was trained on, and for what a solver could go through for ever."""
    if len(timesteps) == 0:
        raise ValueError("there is no step in it")
    bounds = {"timesteps": scheduler.config.num_train_timesteps, "sigmas": MAX_SIGMA}
    for name, bound in bounds.items():
        if not hasattr(scheduler, name):
            continue
        values = torch.as_tensor(getattr(scheduler, name)).cpu()
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"{name} of its schedule are not numbers")
        low, high = float(values.min()), float(values.max())
        if low < 0 or high > bound:
            raise ValueError(f"{name} of its schedule go from {low:g} to {high:g}; they must be from 0 to {bound:g}")


@dataclasses.dataclass(frozen=True)
class _Rehearsal:
    """A solver with its schedule, equal to another if they go the same way."""

    solver_class: type
    config: str
    timesteps: tuple[float, ...]
    sigmas: tuple[float, ...]
    scheduler: Any = dataclasses.field(compare=False)

    @classmethod
    def of(cls, scheduler: Any) -> "_Rehearsal":
        timesteps, sigmas = (
            tuple(torch.as_tensor(getattr(scheduler, name, ())).tolist()) for name in ("timesteps", "sigmas")
        )
        return cls(type(scheduler), repr(scheduler.config), timesteps, sigmas, scheduler)


@functools.lru_cache(maxsize=KEPT_REHEARSALS)
def _rehearse_once(rehearsal: _Rehearsal) -> None:
    """The pictures of a call, and a client that asks for the same again, need only one. What raises is not kept."""
    _rehearse(copy.deepcopy(rehearsal.scheduler))


def _rehearse(trial: Any) -> None:
    """Goes through all steps of a solver, which is of no use afterwards, with next to no latents: what fails of the
    schedule or an option alone, fails here, before a step is computed, and is told to be the request's fault."""
    arguments = step_arguments(trial, torch.Generator().manual_seed(0))
    device = trial.sigmas.device if hasattr(trial, "sigmas") else None
    sample = torch.ones((1, 1, 2, 2), device=device)
    for timestep in trial.timesteps:
        if hasattr(trial, "scale_model_input"):
            trial.scale_model_input(sample, timestep)
        sample = trial.step(torch.zeros_like(sample), timestep, sample, **arguments, return_dict=False)[0]
    if not bool(torch.isfinite(sample).all()):
        raise ValueError("its steps give values that are not numbers")


def _by_steps(scheduler: Any, params: SamplingParams) -> torch.Tensor:
    return set_timesteps(scheduler, params, torch.device("cpu"))
