"""Helpers that the model families share. Functions only, each about one request.

Role: what is the same in every wrapped diffusers pipeline: refusing what it can't do, saying what was cut off a prompt,
and checking a decoded picture before it becomes bytes. Solvers have a file of their own.
"""

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from common.errors import ErrorInfo, RequestError
from common.params import DiffusionRequest

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


class TextLimit(NamedTuple):
    """How many tokens one text encoder takes, special tokens included."""

    encoder: str  # for people
    tokenizer: Any
    max_tokens: int


def cuts(text: str, limits: Iterable[TextLimit]) -> tuple[str, ...]:
    """A sentence, without its subject, for each encoder that cuts the text. One thread at a time may call it."""
    found = []
    for limit in limits:
        dropped = len(limit.tokenizer(text, truncation=False).input_ids) - limit.max_tokens
        if dropped > 0:
            found.append(
                f"is too long for {limit.encoder}, which takes {limit.max_tokens} tokens: "
                f"the last {dropped} were dropped"
            )
    return tuple(found)


def require_finite(decoded: torch.Tensor) -> None:
    """Raises `RequestError` if a decoded picture holds NaN or infinity, which conversion to bytes would hide."""
    if not bool(torch.isfinite(decoded).all()):
        raise RequestError(ErrorInfo("non_finite", "the decoded picture holds values that are not numbers"))


def call_default(pipeline_class: type, parameter: str) -> Any:
    """The default that the diffusers pipeline's own call has for a parameter."""
    return inspect.signature(pipeline_class.__call__).parameters[parameter].default
