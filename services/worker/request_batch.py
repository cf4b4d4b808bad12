"""Request mode's records: a request's state, and the static batch that one call of a pipeline draws.

Role: which requests may share a call, and what the call is told of them. A batch is static: nobody joins or leaves it
between its first denoise step and its pictures. Records and pure functions; it knows neither pipelines nor plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from common.params import DiffusionRequest, SamplingParams
from services.worker.state import Timings
from services.worker.streams import Event


class GivenUpError(Exception):
    """Ends a pipeline's call whose pictures nobody waits for any more."""


class Drawn(NamedTuple):
    """What a call answers for one request."""

    picture: np.ndarray  # (height, width, channels) float32, 0 to 1
    flagged: bool  # the checkpoint's own safety checker refused it


@dataclass(slots=True, eq=False)
class RequestState:
    """One request on this worker, whose only step is the whole call. Compared by identity: a later attempt is another
    state."""

    request: DiffusionRequest
    attempt: int = 1
    step_index: int = 0  # 1 once it is drawn
    drawn: Drawn | None = None  # between the call and its decode
    warnings: tuple[str, ...] = ()  # for the client: what was not done as asked
    timings: Timings = field(default_factory=Timings)
    ready: Event | None = None  # set as for a step-wise state; nothing of this one is on the device

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def total_steps(self) -> int:
        return 1

    def tensors(self) -> list[torch.Tensor]:
        """Nothing of it is on the device between calls."""
        return []


class DiffusionRequestBatch:
    """The requests of one call, in their order. All must be alike in what `shared_params` says."""

    def __init__(self, states: Sequence[RequestState]) -> None:
        self.states = tuple(states)
        if len({shared_params(state.request.params) for state in states}) != 1:
            raise ValueError("requests with other parameters can't share a call")

    def __len__(self) -> int:
        return len(self.states)

    @property
    def params(self) -> SamplingParams:
        """Of the first. The others differ in prompt, negative prompt and seed alone."""
        return self.states[0].request.params

    @property
    def prompts(self) -> list[str]:
        return [state.request.params.prompt for state in self.states]

    @property
    def negative_prompts(self) -> list[str] | None:
        """None: nobody gave one, which to a pipeline is not the same as an empty one."""
        given = [state.request.params.negative_prompt for state in self.states]
        return [text for text in given if text is not None] or None

    @property
    def seeds(self) -> list[int]:
        return [state.request.params.seed for state in self.states]


def shared_params(params: SamplingParams) -> tuple[SamplingParams, bool]:
    """What must be equal among the requests of one call: all but prompt, seed and the words of the negative prompt."""
    shared = msgspec.structs.replace(params, prompt="", negative_prompt=None, seed=0)
    return shared, params.negative_prompt is not None


def parts(states: Sequence[RequestState], together: bool) -> list[list[RequestState]]:
    """`states` by the calls that they need, whatever the plan says: a wrong plan may cost time, never a picture.

    Not `together`: each has a call of its own.
    """
    if not together:
        return [[state] for state in states]
    found: dict[tuple[SamplingParams, bool], list[RequestState]] = {}
    for state in states:
        found.setdefault(shared_params(state.request.params), []).append(state)
    return list(found.values())
