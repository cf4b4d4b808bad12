"""How soon a call is refused when the queue is full.

How. A whole stack whose one worker is busy for good and whose queue is full. Calls are then made one at a time, each of
which must get its 429 with a time to come back after.
"""

import asyncio

from bench.budgets.measurement import Percentiles, Row, spreads
from bench.client import Load, connected
from bench.recording import Durations, Spec, command
from bench.report import percentiles
from bench.stack import ONE_THREAD, POLL_S, BenchError, Processes, Stack
from bench.workload import Call, Shape, call_seed
from services.demo.training.progress import steps as progress

BUDGET_S = 0.020
MAX_QUEUE = 16
STEPS = 200
STEP_S = 1.0  # so that nothing ends while it is measured


class Refusal:
    """Several rounds of calls."""

    name = "refusal"
    budget = "over the queue's bound: a 429 in < 20 ms"

    def __init__(self, calls: int, rounds: int) -> None:
        self._calls = calls
        self._rounds = rounds
        self._measured: list[Percentiles] = []

    async def run(self) -> None:
        with Processes() as processes:
            stack = Stack(processes, scheduler_flags=["--max-queue", str(MAX_QUEUE)])
            spec = Spec(str(processes.folder / "steps"), Durations(step_s=STEP_S))
            stack.start_worker(command(spec), "--max-num-seqs", "1", "--max-residents", "1", *ONE_THREAD)
            await processes.until_ready(stack.url)
            async with connected(stack.url, timeout_s=STEPS * STEP_S) as load:
                # One on the worker, and a full queue. Those beyond that are refused.
                filling = [asyncio.create_task(load.make(_call(number))) for number in range(MAX_QUEUE + 1)]
                try:
                    await _until_refused(load)
                    for _ in progress("refusal", 0, self._rounds):
                        results = [await load.make(_call(number)) for number in range(self._calls)]
                        if any(result.outcome != "refused" for result in results):
                            raise BenchError("a call was accepted although the queue is full")
                        self._measured.append(percentiles([result.latency_s for result in results]))
                finally:
                    for task in filling:
                        task.cancel()
                    await asyncio.gather(*filling, return_exceptions=True)

    def row(self) -> Row | None:
        if not self._measured:
            return None
        figures = spreads(self._measured)
        return Row(
            name=self.name,
            budget=self.budget,
            measured=f"median {figures['p50'].shown(2, 1000)} ms, p99 {figures['p99'].shown(2, 1000)} ms",
            met=figures["p99"].median < BUDGET_S,
            figures=figures,
        )


async def _until_refused(load: Load) -> None:
    """Waits until the queue is full. What is accepted meanwhile fills it."""
    while True:
        probe = asyncio.create_task(load.make(_call(0)))
        done, _ = await asyncio.wait([probe], timeout=POLL_S)
        if done and probe.result().outcome == "refused":
            return
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)


def _call(number: int) -> Call:
    return Call(number, 0.0, Shape(64, 64, STEPS), 1.0, 1, call_seed(0, number), "dummy")
