"""One step of one group: `StepRunner`.

Role: holds the states of requests that are being denoised and runs the step's order on them: batch, denoise, slice,
solve, check, scatter. One request's trouble ends that request alone: a failing forward is bisected, and nothing of a
request is changed before its forward has succeeded. It knows no plans and no sockets; it lives on the step thread.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
import torch

from common.errors import ErrorInfo, RequestError
from common.messages import StepCost
from services.worker.finite import FiniteWatch
from services.worker.halving import in_halves
from services.worker.input_batch import StepInputBatch, scatter_latents
from services.worker.packing import forwards
from services.worker.pipelines.protocol import StepPipeline
from services.worker.state import DiffusionRequestState
from services.worker.streams import mark, take_over, torch_thread

log = structlog.get_logger()

KEPT_BATCHES = 8  # compositions whose buffers are kept: as many groups as a plan is likely to have
NON_FINITE = ErrorInfo("non_finite", "the latents hold values that are not numbers")


@dataclass(slots=True)
class GroupOutcome:
    """What one step did to a group. States are those of the runner."""

    advanced: list[Any] = field(default_factory=list)
    failed: list[tuple[Any, ErrorInfo]] = field(default_factory=list)
    rows: int = 0
    tokens: int = 0  # image tokens, summed over rows


class StepRunner:
    """The states on the denoise stream. Used by the step thread alone, but for `on_thread`."""

    def __init__(self, pipeline: StepPipeline, threads: int = 0) -> None:
        self._pipeline = pipeline
        self._threads = threads
        self._states: dict[str, DiffusionRequestState] = {}
        self._batches: list[StepInputBatch] = []  # most recently used last
        self._finite = FiniteWatch(pipeline.device)
        self.cost: StepCost | None = None  # of a step here, once it has been measured

    def on_thread(self) -> contextlib.AbstractContextManager[None]:
        """What the thread that runs the steps must enter first."""
        return torch_thread(self._pipeline.device, self._threads)

    def add(self, state: DiffusionRequestState) -> None:
        """Takes over a prepared state, in place of an earlier attempt if there is one."""
        take_over(state.ready, state.tensors())
        state.ready = None
        self._states[state.request_id] = state

    def get(self, request_id: str) -> DiffusionRequestState | None:
        return self._states.get(request_id)

    def remove(self, request_id: str) -> None:
        """Lets go of a request: it is finished, failed or not wanted. Unknown ones are ignored."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self._batches = [batch for batch in self._batches if state not in batch.states]
            state.ready = mark(self._pipeline.device)

    def run_group(
        self, states: Sequence[DiffusionRequestState], given_up: Callable[[Any], bool] = lambda state: False
    ) -> GroupOutcome:
        """One denoise step for each of `states`. Those that failed have been let go of. `given_up` is not asked: a step
        is short."""
        outcome = GroupOutcome(
            rows=sum(state.rows for state in states), tokens=sum(state.rows * state.image_tokens for state in states)
        )
        started = time.perf_counter()
        for state in states:
            if state.timings.first_step_at is None:
                state.timings.first_step_at = started
        for part in forwards(states, self._pipeline, self.cost):
            self._run(part, outcome)
        ended = time.perf_counter()
        for state in outcome.advanced:
            assert state.timings.first_step_at is not None
            state.timings.denoise_s = ended - state.timings.first_step_at
        self._let_go(outcome)
        return outcome

    def settle(self) -> list[tuple[DiffusionRequestState, ErrorInfo]]:
        """Failures that a step on CUDA would report late. Call it before waiting for work."""
        outcome = GroupOutcome(failed=[(state, NON_FINITE) for state in self._finite.settle()])
        self._let_go(outcome)
        return outcome.failed

    def _let_go(self, outcome: GroupOutcome) -> None:
        # A late failure may be of a request that has meanwhile left or been replaced: then it is nobody's business.
        outcome.failed = [(state, error) for state, error in outcome.failed if self._holds(state)]
        failed = [state for state, _ in outcome.failed]
        outcome.advanced = [state for state in outcome.advanced if state not in failed]
        for state in failed:
            self.remove(state.request_id)

    def _holds(self, state: DiffusionRequestState) -> bool:
        return self._states.get(state.request_id) is state

    def _run(self, states: list[DiffusionRequestState], outcome: GroupOutcome) -> None:
        def on_fault(state: DiffusionRequestState, error: Exception) -> None:
            log.warning("denoise failed", request_id=state.request_id, step=state.step_index, exc_info=True)
            outcome.failed.append((state, describe(error, "the denoiser")))

        def denoise(part: list[DiffusionRequestState]) -> Sequence[torch.Tensor]:
            return self._denoise(part, keep=part is states)

        for part, noise_preds in in_halves(states, denoise, on_fault, self._pipeline.device):
            self._solve(part, noise_preds, outcome)

    def _denoise(self, states: list[DiffusionRequestState], keep: bool) -> Sequence[torch.Tensor]:
        batch = self._batch(states, keep)
        batch.gather()
        noise_preds = self._pipeline.denoise_step(batch)
        if len(noise_preds) != len(states):
            raise ValueError(f"the denoiser answered {len(noise_preds)} predictions for {len(states)} requests")
        return noise_preds

    def _batch(self, states: list[DiffusionRequestState], keep: bool) -> StepInputBatch:
        for index, batch in enumerate(self._batches):
            if batch.is_of(states):
                self._batches.append(self._batches.pop(index))
                return batch
        batch = StepInputBatch(states)
        if keep:
            self._batches = [*self._batches[-(KEPT_BATCHES - 1) :], batch]
        return batch

    def _solve(
        self, states: list[DiffusionRequestState], noise_preds: Sequence[torch.Tensor], outcome: GroupOutcome
    ) -> None:
        solved: list[DiffusionRequestState] = []
        latents: list[torch.Tensor] = []
        for state, new in zip(states, self._pipeline.step_scheduler(states, noise_preds), strict=True):
            if isinstance(new, Exception):
                log.warning("solver failed", request_id=state.request_id, step=state.step_index, exc_info=new)
                outcome.failed.append((state, describe(new, "the solver")))
                continue
            solved.append(state)
            latents.append(new)
        if not solved:
            return
        try:
            non_finite = self._finite.check(solved, latents)
        except torch.OutOfMemoryError as error:  # the solvers have moved on: there is no second try
            outcome.failed += [(state, describe(error, "the step")) for state in solved]
            return
        scatter_latents(solved, latents)
        outcome.advanced += solved
        outcome.failed += [(state, NON_FINITE) for state in non_finite]


def describe(error: Exception, where: str) -> ErrorInfo:
    """The reason that a client is told. Of a foreign exception it holds the first line only."""
    if isinstance(error, RequestError):
        return error.info
    if isinstance(error, torch.OutOfMemoryError):
        return ErrorInfo("out_of_memory", "the device has not enough memory for this request")
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return ErrorInfo("generation_failed", f"{where} failed: {type(error).__name__}: {first[:300]}")
