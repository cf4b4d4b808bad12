"""One solver step of several requests at once, where that gives what each one's own step would, bit for bit.

Role: for the commonest solvers their arithmetic over stacked latents, instead of the same few small operations for each
request. It repeats the classes' own operations in their order, roundings included, and leaves each solver as its own
step would, so that a request may be stepped alone the next time. It waits for no device.

Only the plain configurations of exactly these classes: flow-match Euler (Esser et al. 2024), Euler (Karras et al. 2022,
algorithm 2 without churn) and DDIM (Song et al. 2020, eta 0).
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler

from services.worker.state import DiffusionRequestState

MIN_CPU_MEMBERS = 4
MAX_CPU_ELEMENTS = 2**14  # of one request's latents

States = Sequence[DiffusionRequestState]


class _Kind(NamedTuple):
    """Members of equal kinds are stepped as one."""

    step: Callable[[States, torch.Tensor, torch.Tensor], torch.Tensor]
    config: Hashable  # what of the solvers' configurations matters to the arithmetic
    shape: torch.Size
    dtypes: tuple[torch.dtype, torch.dtype]  # latents, prediction


def solve_together(states: States, noise_preds: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """New latents by the place in `states`, of those that were stepped as one. The others' solvers are as they were."""
    if len(states) < 2 or (len(states) < MIN_CPU_MEMBERS and states[0].latents.device.type == "cpu"):
        return {}
    groups: dict[_Kind, list[int]] = {}
    for index, (state, noise_pred) in enumerate(zip(states, noise_preds, strict=True)):
        kind = _kind(state, noise_pred)
        if kind is not None:
            groups.setdefault(kind, []).append(index)
    solved: dict[int, torch.Tensor] = {}
    for kind, members in groups.items():
        if _pays(len(members), states[members[0]].latents):
            solved |= _solve_group(kind, members, states, noise_preds)
    return solved


def _pays(members: int, latents: torch.Tensor) -> bool:
    """Whether one step for all is faster than a step for each (`bench/solver_step.py`).

    On a GPU each operation is a launch, whatever its size. On a CPU the copies that stack and part the latents soon
    take longer than what they save.
    """
    if latents.device.type != "cpu":
        return members > 1
    return members >= MIN_CPU_MEMBERS and latents.numel() <= MAX_CPU_ELEMENTS


def _solve_group(
    kind: _Kind, members: list[int], states: States, noise_preds: Sequence[torch.Tensor]
) -> dict[int, torch.Tensor]:
    group = [states[index] for index in members]
    try:
        latents = torch.cat([state.latents for state in group])
        stepped = kind.step(group, latents, torch.cat([noise_preds[index] for index in members]))
    except torch.AcceleratorError:  # the device is broken: that is no request's fault
        raise
    except Exception:  # one of them is at fault: it is found where each is stepped alone
        return {}
    return dict(zip(members, stepped.to(latents.dtype).split(1), strict=True))


def _kind(state: DiffusionRequestState, noise_pred: torch.Tensor) -> _Kind | None:
    """None: it is to be stepped by its own solver."""
    solver, settings = type(state.scheduler), state.scheduler.config
    if noise_pred.shape != state.latents.shape:
        return None
    alike = (state.latents.shape, (state.latents.dtype, noise_pred.dtype))
    if solver is FlowMatchEulerDiscreteScheduler and not settings.stochastic_sampling:
        return _Kind(_flow_match_euler, None, *alike)
    if solver is EulerDiscreteScheduler and settings.prediction_type in ("epsilon", "v_prediction"):
        return _Kind(_euler, settings.prediction_type, *alike)
    if solver is DDIMScheduler and not settings.thresholding and not state.extra_step_kwargs.get("eta"):
        clip = settings.clip_sample_range if settings.clip_sample else None
        return _Kind(_ddim, (settings.prediction_type, clip), *alike)
    return None


def _flow_match_euler(states: States, sample: torch.Tensor, velocity: torch.Tensor) -> torch.Tensor:
    sigma, sigma_next = _sigmas(states)
    # The solver has its sigmas on the latents' device, so that they are rounded to the other factor's type.
    dt = (sigma_next - sigma).to(velocity.dtype).view(-1, *[1] * (sample.ndim - 1))
    stepped = (sample.float() + dt * velocity).to(velocity.dtype)
    for state in states:
        state.scheduler._step_index += 1
    return stepped


def _euler(states: States, sample: torch.Tensor, noise_pred: torch.Tensor) -> torch.Tensor:
    sigma, sigma_next = _sigmas(states)
    variance = sigma**2 + 1
    sigmas, dt, variances, velocity_scale = _columns(
        sample, sigma, sigma_next - sigma, variance, -sigma / variance**0.5
    )
    upcast = sample.float()
    if states[0].scheduler.config.prediction_type == "epsilon":
        original = upcast - _scaled(sigmas, noise_pred)
    else:
        original = _times(noise_pred, velocity_scale) + _divided(upcast, variances)
    stepped = (upcast + _divided(upcast - original, sigmas) * dt).to(noise_pred.dtype)
    for state in states:
        state.scheduler._step_index += 1
    return stepped


def _ddim(states: States, sample: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
    config = states[0].scheduler.config
    alphas, alphas_prev = [], []
    for state in states:
        scheduler, timestep = state.scheduler, int(state.host_timesteps[state.step_index])
        previous = timestep - scheduler.config.num_train_timesteps // scheduler.num_inference_steps
        alphas.append(scheduler.alphas_cumprod[timestep])
        alphas_prev.append(scheduler.alphas_cumprod[previous] if previous >= 0 else scheduler.final_alpha_cumprod)
    alpha, alpha_prev = torch.stack(alphas), torch.stack(alphas_prev)
    root_alpha, root_beta, root_alpha_prev, root_beta_prev = _columns(
        sample, alpha**0.5, (1 - alpha) ** 0.5, alpha_prev**0.5, (1 - alpha_prev) ** 0.5
    )
    if config.prediction_type == "epsilon":
        original = _divided(sample - _scaled(root_beta, model_output), root_alpha)
        epsilon = model_output
    elif config.prediction_type == "sample":
        original = model_output
        epsilon = _divided(sample - _scaled(root_alpha, original), root_beta)
    else:
        original = _scaled(root_alpha, sample) - _scaled(root_beta, model_output)
        epsilon = _scaled(root_alpha, model_output) + _scaled(root_beta, sample)
    if config.clip_sample:
        original = original.clamp(-config.clip_sample_range, config.clip_sample_range)
    return _scaled(root_alpha_prev, original) + _scaled(root_beta_prev, epsilon)


def _sigmas(states: States) -> tuple[torch.Tensor, torch.Tensor]:
    """(requests,) noise levels of this step, and those that it leads to, where the solvers have them."""
    now, following = [], []
    for state in states:
        scheduler = state.scheduler
        if scheduler.step_index is None:
            scheduler._init_step_index(state.host_timesteps[state.step_index])
        now.append(scheduler.sigmas[scheduler.step_index])
        following.append(scheduler.sigmas[scheduler.step_index + 1])
    return torch.stack(now), torch.stack(following)


def _columns(sample: torch.Tensor, *coefficients: torch.Tensor) -> list[torch.Tensor]:
    """(requests,) coefficients on the CPU, as (requests, 1, …) beside `sample`: one copy for all of them."""
    table = torch.stack(coefficients)
    if sample.is_cuda:
        table = table.pin_memory().to(sample.device, non_blocking=True)
    return [row.view(-1, *[1] * (sample.ndim - 1)) for row in table.unbind()]


def _scaled(coefficient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`number * tensor` in the tensor's own type. There torch rounds the number to that type first, but on a GPU only
    the product."""
    if tensor.is_cuda:
        return _times(tensor, coefficient)
    return coefficient.to(tensor.dtype) * tensor


def _times(tensor: torch.Tensor, coefficient: torch.Tensor) -> torch.Tensor:
    """`tensor * number`, where only the product is rounded."""
    return (tensor * coefficient).to(tensor.dtype)


def _divided(tensor: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """`tensor / number`, likewise. On a GPU torch multiplies by the reciprocal."""
    quotient = tensor * (1.0 / divisor) if tensor.is_cuda else tensor / divisor
    return quotient.to(tensor.dtype)
