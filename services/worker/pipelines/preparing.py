"""Helpers that the model families share. Functions only, each about one request.

Role: what is the same in every wrapped diffusers pipeline: refusing what it can't do, a pipeline view with a solver of
its own, saying what was cut off a prompt, and checking a decoded picture before it becomes bytes.
"""

import contextlib
import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from common.errors import ErrorInfo, RequestError
from common.params import DiffusionRequest, SamplingParams

# SamplingParams fields that a family heeds only if it says so, with the value that means "not asked for".
_OPTIONAL: dict[str, Any] = {
    "num_frames": 1,
    "true_cfg_scale": None,
    "max_sequence_length": None,
    "lora": (),
    "scheduler": None,
    "sigmas": None,
    "timesteps": None,
    "strength": None,
}


def refuse_unsupported(
    request: DiffusionRequest, accepts: Iterable[str] = (), lacks: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Raises `RequestError` if the request asks for something that the family would silently ignore.

    `lacks` names what else the family does not heed, each with the value that means "not asked for".
    """
    for field, absent in {**_OPTIONAL, **lacks}.items():
        if field not in accepts and getattr(request.params, field) != absent:
            raise RequestError(ErrorInfo("invalid_request", f"this model does not take {field}", field))
    if request.inputs:
        raise RequestError(ErrorInfo("invalid_request", "this model does not take input images", "image"))


@contextlib.contextmanager
def as_invalid_request() -> Iterator[None]:
    """For a pipeline's own check of its inputs: what it raises is the client's to mend."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise RequestError(ErrorInfo("invalid_request", str(error))) from error


def with_own_scheduler(pipe: Any) -> Any:
    """A view of the diffusers pipeline that shares all models but has a fresh solver, as the checkpoint configures it.

    The pipeline's own methods (`prepare_latents`, `prepare_extra_step_kwargs`) then read this request's solver.
    """
    view = copy.copy(pipe)
    view.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    return view


def fix_first_step(scheduler: Any, timesteps: torch.Tensor) -> None:
    """Lets the solver look up where it starts now: within the step loop the look-up would wait for the device."""
    if hasattr(scheduler, "set_begin_index") and hasattr(scheduler, "index_for_timestep"):
        scheduler.set_begin_index(scheduler.index_for_timestep(timesteps[0]))


class TextLimit(NamedTuple):
    """How many tokens one text encoder takes, special tokens included."""

    encoder: str  # for people
    tokenizer: Any
    max_tokens: int


def truncation_warnings(params: SamplingParams, uses_negative_prompt: bool, limits: Iterable[TextLimit]) -> list[str]:
    """A sentence for each text that an encoder cuts. Call it under the lock that guards the tokenizers."""
    texts = [("prompt", params.prompt)]
    if uses_negative_prompt and params.negative_prompt:
        texts.append(("negative_prompt", params.negative_prompt))
    found = []
    for field, text in texts:
        for limit in limits:
            dropped = len(limit.tokenizer(text, truncation=False).input_ids) - limit.max_tokens
            if dropped > 0:
                found.append(
                    f"{field} is too long for {limit.encoder}, which takes {limit.max_tokens} tokens: "
                    f"the last {dropped} were dropped"
                )
    return found


def require_finite(decoded: torch.Tensor) -> None:
    """Raises `RequestError` if a decoded picture holds NaN or infinity, which conversion to bytes would hide."""
    if not bool(torch.isfinite(decoded).all()):
        raise RequestError(ErrorInfo("non_finite", "the decoded picture holds values that are not numbers"))


def call_default(pipeline_class: type, parameter: str) -> Any:
    """The default that the diffusers pipeline's own call has for a parameter."""
    return inspect.signature(pipeline_class.__call__).parameters[parameter].default
