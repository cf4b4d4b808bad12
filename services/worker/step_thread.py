"""The thread that owns the denoise stream: boundary after boundary, the steps that the plans ask for.

Role: a mailbox that the event loop writes to (states, releases, plans), the loop that runs one step of the current plan
and reports it, and nothing else. It sees the model only through `GroupRunner`, and no socket. All that it is told takes
effect at a step boundary. Waiting is on a condition, so an idle thread costs nothing.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import structlog

from common.errors import ErrorInfo
from common.messages import Failure, GroupTiming, Progress, StepPlan, StepResult
from services.worker import plans

log = structlog.get_logger()


class RunnableState(Protocol):
    """What the thread must know of a request."""

    attempt: int
    step_index: int

    @property
    def request_id(self) -> str: ...

    @property
    def total_steps(self) -> int: ...


class Outcome(Protocol):
    """What one step did to a group."""

    advanced: list[Any]
    failed: list[tuple[Any, ErrorInfo]]
    rows: int
    tokens: int


class GroupRunner(Protocol):
    """What runs the steps; `StepRunner` or `RequestRunner` in production."""

    def on_thread(self) -> contextlib.AbstractContextManager[None]: ...

    def add(self, state: Any) -> None: ...

    def get(self, request_id: str) -> Any | None: ...

    def remove(self, request_id: str) -> None: ...

    # `given_up` says of a state, from one moment to the next, that nobody waits for it any more. What takes long should
    # ask now and then, and may return early, without an outcome for those that it gave up.
    def run_group(self, states: Sequence[Any], given_up: Callable[[Any], bool]) -> Outcome: ...

    def settle(self) -> list[tuple[Any, ErrorInfo]]: ...


@dataclass(frozen=True, slots=True)
class Boundary:
    """What happened in one step, for the event loop."""

    result: StepResult
    finished: tuple[Any, ...]  # states that have all their steps behind them and have left for decode


class StepThread:
    """Start it once, tell it things from any thread, stop it once."""

    def __init__(
        self,
        runner: GroupRunner,
        worker_id: str,
        on_boundary: Callable[[Boundary], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._runner = runner
        self._worker_id = worker_id
        self._on_boundary = on_boundary  # called on this thread
        self._on_crash = on_crash  # called on this thread, which then ends
        self._wake = threading.Condition()
        # Guarded by _wake.
        self._orders: list[Callable[[], None]] = []  # bounded by what the shell holds: a few for each resident
        self._released: set[tuple[str, int]] = set()  # whose release is among the orders
        self._plans = plans.PlanQueue()
        self._last_step_id = 0
        self._stopping = False
        # Of the thread alone.
        self._left: set[tuple[str, int]] = set()  # requests that have all their steps behind them and left for decode
        self._step_ended_at: float | None = None  # time.perf_counter
        self._thread = threading.Thread(target=self._main, name="stepweave-steps", daemon=True)

    # ---- from the event loop

    def start(self) -> None:
        self._thread.start()

    def add(self, state: RunnableState) -> None:
        """A prepared request joins at the next boundary."""
        self._order(lambda: self._runner.add(state))

    def release(self, request_id: str, attempt: int) -> None:
        """A request is forgotten at the next boundary."""
        with self._wake:
            self._released.add((request_id, attempt))
            self._order(lambda: self._release(request_id, attempt))

    def submit(self, plan: StepPlan) -> None:
        """Takes a plan's groups. The caller has seen to it that plans come in order."""
        with self._wake:
            self._plans.offer(plan)
            self._last_step_id = plan.step_id
            self._wake.notify()

    def begin_epoch(self) -> None:
        """Plans of a new scheduler count from anew; the steps that were planned go on until a new plan comes."""
        with self._wake:
            self._last_step_id = 0

    @property
    def idle(self) -> bool:
        """No plan is running and none is pending."""
        with self._wake:
            return self._plans.idle

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread at the next boundary. False if it has not got there in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _order(self, order: Callable[[], None]) -> None:
        with self._wake:
            self._orders.append(order)
            self._wake.notify()

    # ---- on the thread

    def _main(self) -> None:
        try:
            with self._runner.on_thread():
                while self._boundary():
                    pass
        except BaseException as error:  # handed to the owner, who ends the process with it
            log.error("the step thread ended", exc_info=True)
            self._on_crash(error)

    def _boundary(self) -> bool:
        """Does what was ordered, then one step if a plan asks for it. False: stop."""
        with self._wake:
            while not (self._orders or self._stopping or not self._plans.idle):
                self._wake.wait()
            if self._stopping:
                return False
            orders, self._orders = self._orders, []
            self._released.clear()
            plan = self._plans.begin_step()
        for order in orders:
            order()
        if plan is not None:
            self._step(plan)
        return True

    def _step(self, plan: StepPlan) -> None:
        skipped = plans.absent(plan, self._position)
        begun = time.perf_counter()
        idle_s = 0.0 if self._step_ended_at is None else begun - self._step_ended_at
        advanced, failed, timings = self._run_groups(plan)
        done = plans.is_done(plan, self._position)
        if done:
            # On CUDA this is where the device's time passes: launching the step took next to none.
            waiting_from = time.perf_counter()
            failed += self._runner.settle()
            if timings:
                waited_s = time.perf_counter() - waiting_from
                timings[-1] = msgspec.structs.replace(timings[-1], seconds=timings[-1].seconds + waited_s)
        if timings:
            self._step_ended_at = time.perf_counter()
        ended = [state for state, _ in failed]
        advanced = [state for state in advanced if state not in ended]
        finished = [state for state in advanced if state.step_index >= state.total_steps]
        for state in finished:
            self._left.add((state.request_id, state.attempt))
            self._runner.remove(state.request_id)
        with self._wake:
            if done:
                self._plans.end_plan()
            last_step_id = self._last_step_id
        result = StepResult(
            worker_id=self._worker_id,
            scheduler_boot_id=plan.scheduler_boot_id,
            step_id=plan.step_id,
            progress=tuple(Progress(state.request_id, state.attempt, state.step_index) for state in advanced),
            failed=tuple(Failure(state.request_id, state.attempt, error) for state, error in failed),
            skipped=skipped,
            plan_done=done,
            last_step_id=last_step_id,
            timings=tuple(timings),
            idle_s=idle_s if timings else 0.0,
        )
        self._on_boundary(Boundary(result, tuple(finished)))

    def _run_groups(self, plan: StepPlan) -> tuple[list[Any], list[tuple[Any, ErrorInfo]], list[GroupTiming]]:
        advanced: list[Any] = []
        failed: list[tuple[Any, ErrorInfo]] = []
        timings: list[GroupTiming] = []
        for group in plan.groups:
            members = plans.runnable(group, self._position)
            if not members:
                continue
            states = [self._runner.get(member.request_id) for member in members]
            begun = time.perf_counter()
            outcome = self._runner.run_group(states, self._is_given_up)
            seconds = time.perf_counter() - begun
            timings.append(GroupTiming(len(states), outcome.rows, outcome.tokens, seconds))
            advanced += outcome.advanced
            failed += outcome.failed
        return advanced, failed, timings

    def _release(self, request_id: str, attempt: int) -> None:
        self._left.discard((request_id, attempt))
        state = self._runner.get(request_id)
        if state is not None and state.attempt == attempt:
            self._runner.remove(request_id)

    def _is_given_up(self, state: RunnableState) -> bool:
        with self._wake:
            return self._stopping or (state.request_id, state.attempt) in self._released

    def _position(self, request_id: str, attempt: int) -> int | None:
        state = self._runner.get(request_id)
        if state is not None and state.attempt == attempt:
            step: int = state.step_index
            return step
        return plans.BEYOND if (request_id, attempt) in self._left else None
