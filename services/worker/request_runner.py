"""Request mode's step, which is a whole call of the pipeline: `RequestRunner`.

Role: holds the states of requests that wait for their call, makes static batches of those that a plan names, and calls
the pipeline on each. One request's trouble ends that request alone: a failing call is halved. A call that nobody waits
for any more is left half-way. It knows no plans and no sockets; it lives on the step thread.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import structlog
import torch

from common.messages import ModelProfile
from common.rows import row_tokens, uses_cfg
from services.worker.halving import in_halves
from services.worker.request_batch import DiffusionRequestBatch, Drawn, GivenUpError, RequestState, parts
from services.worker.runner import GroupOutcome, describe
from services.worker.streams import torch_thread

log = structlog.get_logger()


class Draws(Protocol):
    """What makes the pictures; `WholeCallPipeline` in production."""

    device: torch.device

    def draw(self, batch: DiffusionRequestBatch, given_up: Callable[[], bool] = ...) -> list[Drawn]: ...


class RequestRunner:
    """A `GroupRunner` for request mode. Used by the step thread alone, but for `on_thread`."""

    def __init__(self, pipeline: Draws, profile: ModelProfile, together: bool, threads: int = 0) -> None:
        self._pipeline = pipeline
        self._profile = profile
        self._together = together  # whether requests may share a call
        self._threads = threads
        self._states: dict[str, RequestState] = {}

    def on_thread(self) -> contextlib.AbstractContextManager[None]:
        """What the thread that makes the calls must enter first."""
        return torch_thread(self._pipeline.device, self._threads)

    def add(self, state: RequestState) -> None:
        """Takes over a prepared state, in place of an earlier attempt if there is one."""
        self._states[state.request_id] = state

    def get(self, request_id: str) -> RequestState | None:
        return self._states.get(request_id)

    def remove(self, request_id: str) -> None:
        """Lets go of a request: it is drawn, failed or not wanted. Unknown ones are ignored."""
        self._states.pop(request_id, None)

    def run_group(
        self, states: Sequence[RequestState], given_up: Callable[[Any], bool] = lambda state: False
    ) -> GroupOutcome:
        """The pictures of `states`, but for those that all of a call's members gave up. Those that failed have been let
        go of."""
        outcome = GroupOutcome(rows=sum(map(self._rows, states)), tokens=sum(map(self._tokens, states)))
        for part in parts(states, self._together):
            self._run(part, given_up, outcome)
        for state, _ in outcome.failed:
            self.remove(state.request_id)
        return outcome

    def settle(self) -> list[tuple[Any, Any]]:
        """Nothing is found out late: a call ends with its pictures on the CPU."""
        return []

    def _run(self, part: list[RequestState], given_up: Callable[[Any], bool], outcome: GroupOutcome) -> None:
        def on_fault(state: RequestState, error: Exception) -> None:
            log.warning("the pipeline failed", request_id=state.request_id, exc_info=True)
            outcome.failed.append((state, describe(error, "the pipeline")))

        def draw(states: list[RequestState]) -> list[tuple[RequestState, Drawn]]:
            wanted = [state for state in states if not given_up(state)]
            if not wanted:
                return []
            log.debug("calling the pipeline", requests=[state.request_id for state in wanted])
            try:
                drawn = self._pipeline.draw(DiffusionRequestBatch(wanted), lambda: all(map(given_up, wanted)))
            except GivenUpError:
                log.debug("call left half-way", requests=[state.request_id for state in wanted])
                return []
            return list(zip(wanted, drawn, strict=True))

        begun = time.perf_counter()
        for _, pairs in in_halves(part, draw, on_fault, self._pipeline.device):
            ended = time.perf_counter()
            for state, drawn in pairs:
                state.drawn = drawn
                state.step_index = 1
                state.timings.denoise_s = ended - begun
                outcome.advanced.append(state)

    def _rows(self, state: RequestState) -> int:
        return 2 if uses_cfg(state.request.params, self._profile) else 1

    def _tokens(self, state: RequestState) -> int:
        params = state.request.params
        return self._rows(state) * row_tokens(params.height, params.width, params.num_frames, self._profile.size)
