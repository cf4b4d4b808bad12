"""A request's own solver: chosen, given its schedule, stepped. Functions only.

Role: what every family does with diffusers' schedulers, which are called solvers here, as Stepweave has a scheduler of
its own. Each request has a solver for itself, since all of them keep state.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import retrieve_timesteps

from common.params import SamplingParams
from services.worker.state import DiffusionRequestState


def with_own_scheduler(pipe: Any, params: SamplingParams) -> Any:
    """A view of the diffusers pipeline that shares all models but has a fresh solver, as the checkpoint configures it.

    The pipeline's own methods (`prepare_latents`, `prepare_extra_step_kwargs`) then read this request's solver.
    """
    view = copy.copy(pipe)
    view.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    return view


def set_timesteps(
    scheduler: Any, params: SamplingParams, device: torch.device, sigmas: Any = None, **arguments: Any
) -> torch.Tensor:
    """Gives the request's solver its schedule. Returns (total steps,) timesteps on `device`.

    `sigmas` is what the pipeline's call passes by itself, `arguments` what else it does.
    """
    timesteps: torch.Tensor
    timesteps, _ = retrieve_timesteps(scheduler, params.num_inference_steps, device, sigmas=sigmas, **arguments)
    # Within the step loop the look-up of where it starts would wait for the device.
    if hasattr(scheduler, "set_begin_index") and hasattr(scheduler, "index_for_timestep"):
        scheduler.set_begin_index(scheduler.index_for_timestep(timesteps[0]))
    return timesteps


def solve(
    states: Sequence[DiffusionRequestState], noise_preds: Sequence[torch.Tensor]
) -> list[torch.Tensor | Exception]:
    """One step of each request's solver: its new latents, or what the solver raised."""
    return [_solve_one(state, noise_pred) for state, noise_pred in zip(states, noise_preds, strict=True)]


def _solve_one(state: DiffusionRequestState, noise_pred: torch.Tensor) -> torch.Tensor | Exception:
    timestep = state.host_timesteps[state.step_index]
    try:
        latents: torch.Tensor = state.scheduler.step(
            noise_pred, timestep, state.latents, **state.extra_step_kwargs, return_dict=False
        )[0]
    except Exception as error:  # foreign code: whatever it raises ends this request alone
        return error
    return latents.to(state.latents.dtype)
