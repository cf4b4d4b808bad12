"""Without faults, a worker whose plans take less than a step to reach it never waits and leaves no place free."""

import heapq
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common import messages as m
from common.params import DiffusionRequest
from services.scheduler.core import SchedulerCore
from tests import builders
from tests.scheduler.model_worker import ModelWorker
from tests.scheduler.world import BOOT

STEP_S = 1.0
LATENCY_S = 0.45  # one way; there and back is less than a step
KNOWN_S = 2 * LATENCY_S + 0.01  # after this the plan that answers a message has reached the worker


class Line:
    """One worker that runs steps back to back, a core, and a constant delay between them."""

    def __init__(self, lease_steps: int, max_num_seqs: int, max_residents: int) -> None:
        self.core = SchedulerCore(BOOT, lease_steps=lease_steps)
        self.worker = ModelWorker("worker-1", max_num_seqs=max_num_seqs, max_residents=max_residents)
        self.now = 0.0
        self.ready_at: dict[str, float] = {}
        self.steps: list[tuple[float, tuple[str, ...]]] = []
        self.completed: list[str] = []
        self.empty_boundaries: list[float] = []
        self.short_steps: list[tuple[float, tuple[str, ...], list[str]]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._preparing = False
        self.core.handle(builders.gateway_hello(scheduler_boot_id=BOOT), 0.0)
        self.worker.boot_id = BOOT
        self.worker.hello()
        self._sent()

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    def run(self) -> None:
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def submit(self, request: DiffusionRequest) -> None:
        self._handle(builders.submit(request))

    def _handle(self, event: Any) -> None:
        for send in self.core.handle(event, self.now):
            if send.to == self.worker.worker_id:
                self.at(self.now + LATENCY_S, lambda message=send.message: self._receive(message))  # type: ignore[misc]
        self.core.validate()

    def _sent(self) -> None:
        for message in self.worker.flush():
            self.at(self.now + LATENCY_S, lambda message=message: self._handle(message))  # type: ignore[misc]

    def _receive(self, message: Any) -> None:
        self.worker.receive(message)
        self._prepare()
        if self.worker.in_step is None:
            self._begin()

    def _prepare(self) -> None:
        """One at a time, in order, as a side thread does."""
        if not self._preparing and any(held.phase == "preparing" for held in self.worker.held.values()):
            self._preparing = True
            self.at(self.now + 0.1, self._prepared)

    def _prepared(self) -> None:
        self._preparing = False
        self.worker.prepare()
        for request_id, held in self.worker.held.items():
            if held.phase != "preparing":
                self.ready_at.setdefault(request_id, self.now)
        self._sent()
        self._prepare()

    def _begin(self) -> None:
        while self.worker.begin_step():
            if self.worker.in_step:
                self._note_step(tuple(self.worker.in_step))
                self.at(self.now + STEP_S, self._boundary)
                return
            self.worker.end_step()  # a plan that had nothing left to do
            self._sent()

    def _note_step(self, members: tuple[str, ...]) -> None:
        self.steps.append((self.now, members))
        runnable = self._runnable()
        if len(members) < min(len(runnable), self.worker.max_num_seqs):
            self.short_steps.append((self.now, members, runnable))

    def _runnable(self) -> list[str]:
        return [
            request_id
            for request_id, held in self.worker.held.items()
            if held.phase == "denoising" and self.ready_at[request_id] + KNOWN_S < self.now
        ]

    def _boundary(self) -> None:
        self.worker.end_step()
        self._sent()
        self._begin()
        if self.worker.in_step is None and self._runnable():
            self.empty_boundaries.append(self.now)
        while (request_id := self.worker.decode()) is not None:
            self.completed.append(request_id)
            self._sent()


arrivals = st.lists(
    st.tuples(st.floats(0, 12, allow_nan=False), st.integers(1, 7)),
    min_size=1,
    max_size=12,
)


def run_line(load: list[tuple[float, int]], lease_steps: int, max_num_seqs: int, max_residents: int) -> Line:
    line = Line(lease_steps, max_num_seqs, max_residents)
    for number, (time, steps) in enumerate(sorted(load)):
        request = builders.request(f"r{number}", num_inference_steps=steps)
        line.at(1.0 + time, lambda request=request: line.submit(request))  # type: ignore[misc]
    line.run()
    assert len(line.completed) == len(load)
    return line


@pytest.mark.parametrize("lease_steps", [1, 4])
@settings(max_examples=100, deadline=None, derandomize=True)
@example(load=[(0.0, 1)] * 6)
@example(load=[(0.0, 2)] * 4)
@example(load=[(0.0, 2), (0.0, 2), (0.0, 6), (1.0, 2), (1.0, 4), (2.0, 2), (2.0, 2), (7.5, 1)])
@given(load=arrivals)
def test_every_step_has_as_many_members_as_it_can(lease_steps: int, load: list[tuple[float, int]]) -> None:
    line = run_line(load, lease_steps, max_num_seqs=3, max_residents=9)
    assert line.short_steps == []
    assert line.empty_boundaries == []


@pytest.mark.parametrize("lease_steps", [1, 4])
def test_a_newcomer_joins_at_the_first_boundary_that_its_plan_can_reach(lease_steps: int) -> None:
    line = run_line([(0.0, 20), (5.0, 3)], lease_steps, max_num_seqs=3, max_residents=9)
    known = line.ready_at["r1"] + 2 * LATENCY_S
    joined = next(time for time, members in line.steps if "r1" in members)
    assert joined - known <= STEP_S


def test_a_request_that_runs_alone_takes_its_steps_back_to_back() -> None:
    line = run_line([(0.0, 7)], lease_steps=1, max_num_seqs=3, max_residents=9)
    times = [time for time, _ in line.steps]
    assert [b - a for a, b in itertools.pairwise(times)] == pytest.approx([STEP_S] * 6)


def test_with_leases_a_steady_batch_needs_few_plans() -> None:
    line = Line(4, max_num_seqs=3, max_residents=9)
    plans = []
    line.at(1.0, lambda: line.submit(builders.request("r0", num_inference_steps=40)))
    receive = line._receive

    def count(message: Any) -> None:
        plans.append(message) if isinstance(message, m.StepPlan) else None
        receive(message)

    line._receive = count  # type: ignore[method-assign]
    line.run()
    assert len([plan for plan in plans if plan.groups]) <= 12
