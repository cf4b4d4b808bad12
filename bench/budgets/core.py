"""The pure core: what one plan and one result cost, for 8 requests a worker, as the number of workers grows.

How. `SchedulerCore` alone, on a virtual clock on which a step takes 20 ms. Each worker in turn reports a step, which
the core answers with a plan and, now and then, with updates to the gateway; only `handle` is timed. Fleets of all
sizes are measured by turns.
"""

import asyncio
import time
from collections.abc import Sequence

from bench.budgets.measurement import Row
from bench.budgets.virtual_worker import GATEWAY_ID, REQUESTS, VirtualWorker, submission
from bench.report import spread
from bench.stack import BenchError
from common import messages as m
from common.config import HEARTBEAT_S
from services.demo.training.progress import steps as progress
from services.scheduler.core import Event, SchedulerCore, Tick

BUDGET_S = 50e-6
FLEETS = (10, 100, 1000)
STEP_S = 0.02
BOOT = "scheduler-bench"
TURN = 500  # cycles between two chances to be interrupted
UNTIL_STEADY = 8  # steps of each worker, after which it runs all that it holds


class CoreCost:
    """Several rounds of all fleets."""

    name = "core"
    budget = "pure core, one plan and one result, 8 requests a worker: < 50 µs, flat from 10 to 1,000 workers"

    def __init__(self, cycles: int, rounds: int, fleets: Sequence[int] = FLEETS) -> None:
        self._cycles = cycles
        self._rounds = rounds
        self._measured: dict[int, list[float]] = {size: [] for size in fleets}

    async def run(self) -> None:
        fleets = {size: VirtualFleet(size) for size in self._measured}
        for fleet in fleets.values():
            await fleet.seconds_a_cycle(self._cycles)  # pays for one-off work
        for _ in progress("core", 0, self._rounds):
            for size, fleet in fleets.items():
                self._measured[size].append(await fleet.seconds_a_cycle(self._cycles))

    def row(self) -> Row | None:
        if not all(self._measured.values()):
            return None
        figures = {f"{size} workers": spread(values) for size, values in self._measured.items()}
        texts = [f"{name}: {seconds.shown(1, 1e6)} µs" for name, seconds in figures.items()]
        return Row(
            name=self.name,
            budget=self.budget,
            measured="; ".join(texts),
            met=all(seconds.median < BUDGET_S for seconds in figures.values()),
            figures=figures,
        )


class VirtualFleet:
    """A core and workers that are all at work."""

    def __init__(self, size: int) -> None:
        self._core = SchedulerCore(BOOT, max_queue=1_000_000)
        self._now = 0.0
        self._next = 0  # whose turn it is
        self._beat_at = 0.0
        self._seconds = 0.0  # in the core, of what was timed
        self._plans = 0  # with work, of what was timed
        self._workers = {f"worker-{number}": VirtualWorker(f"worker-{number}") for number in range(size)}
        self._handle(m.GatewayHello(GATEWAY_ID, m.PROTOCOL_VERSION, BOOT))
        for worker in self._workers.values():
            self._handle(worker.hello(BOOT))
        for number in range(size):
            self._handle(submission(number))
        for _ in range(UNTIL_STEADY):
            for worker in self._workers.values():
                result = worker.step()
                if result is not None:
                    self._handle(result)

    async def seconds_a_cycle(self, cycles: int) -> float:
        """Mean seconds in the core of a result and the plan that answers it."""
        self._seconds, self._plans = 0.0, 0
        workers = list(self._workers.values())
        for cycle in range(cycles):
            if cycle % TURN == 0:
                await asyncio.sleep(0)
            worker = workers[self._next % len(workers)]
            self._next += 1
            self._now += STEP_S / len(workers)
            self._beat()
            result = worker.step()
            if result is None or len(result.progress) != REQUESTS:
                raise BenchError(f"{worker.worker_id} had less than 8 requests to run: this measures no steady load")
            self._handle(result, timed=True)
        if self._plans < 0.9 * cycles:
            raise BenchError(f"{cycles} results were answered by {self._plans} plans only: this measures no cycle")
        return self._seconds / cycles

    def _beat(self) -> None:
        """What time brings, beside the steps. It is not timed."""
        if self._now >= self._beat_at:
            self._beat_at = self._now + HEARTBEAT_S
            self._handle(m.GatewayHeartbeat(GATEWAY_ID, BOOT))
        deadline = self._core.next_deadline()
        if deadline is not None and deadline <= self._now:
            self._handle(Tick())

    def _handle(self, event: Event, timed: bool = False) -> None:
        begun = time.perf_counter()
        sends = self._core.handle(event, self._now)
        if timed:
            self._seconds += time.perf_counter() - begun
        answers = []
        for to, message in sends:
            if isinstance(message, m.StepPlan) and to in self._workers:
                self._plans += bool(message.groups) and timed
                answers += self._workers[to].on_plan(message)
        for ready in answers:
            self._handle(ready)
