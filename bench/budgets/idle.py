"""Idle time of a worker between two steps: the end of one to the start of the next, on the step thread.

How. A whole stack with a dummy model whose step takes 5 ms and releases the interpreter lock, 8 requests in each step,
no leases. Requests of 32 steps leave and join one at a time, so the composition changes every 4 steps. Once with
nothing beside the step loop, and once with encoding and decoding of 5 ms each, which come with every change of
composition. Counted is each gap between the first and the last step with 8 requests, those with a change too.
"""

from collections.abc import Sequence

from bench.budgets.measurement import Percentiles, Row, median_row
from bench.client import check_completed, connected
from bench.recording import Durations, Spec, Step, command, read_steps
from bench.report import percentiles
from bench.stack import ONE_THREAD, BenchError, Processes, Stack
from bench.workload import Call, Shape, call_seed
from services.demo.training.progress import steps as progress

BUDGET_S = 0.0003
REQUESTS = 8  # in a step
STEPS = 32  # of a request: with 8 of them, one leaves every 4 steps
CLIENTS = 2 * REQUESTS  # so that the next are prepared ahead
BESIDE = {
    "nothing beside": Durations(step_s=0.005),
    "encode and decode beside": Durations(step_s=0.005, encode_s=0.005, decode_s=0.005),
}


class IdleTime:
    """Several rounds of both variants."""

    name = "idle"
    budget = "idle time between two steps: median < 0.3 ms, p99 reported"

    def __init__(self, calls: int, rounds: int) -> None:
        self._calls = calls
        self._rounds = rounds
        self._measured: dict[str, list[Percentiles]] = {name: [] for name in BESIDE}

    async def run(self) -> None:
        for _ in progress("idle", 0, self._rounds):
            for name, durations in BESIDE.items():
                self._measured[name].append(await self._one(durations))

    async def _one(self, durations: Durations) -> Percentiles:
        """Percentiles of the gaps of one run, in seconds."""
        with Processes() as processes:
            record = processes.folder / "steps"
            worker = command(Spec(str(record), durations))
            stack = Stack(processes)
            stack.start_worker(worker, "--max-num-seqs", str(REQUESTS), "--max-residents", str(CLIENTS), *ONE_THREAD)
            await processes.until_ready(stack.url)
            async with connected(stack.url) as load:
                await load.closed_loop(staggered(self._calls), CLIENTS)
            check_completed(load.results)
            found = gaps(read_steps(record))
        if not found:
            raise BenchError(f"there were never two steps of {REQUESTS} requests; ask for more --calls")
        return percentiles(found)

    def row(self) -> Row | None:
        return median_row(self.name, self.budget, BUDGET_S, self._measured, digits=3)


def staggered(count: int) -> list[Call]:
    """Calls of which the first 8 have 4, 8, …, 32 steps and all others 32, so that they end one after another."""
    steps = [STEPS * (number + 1) // REQUESTS if number < REQUESTS else STEPS for number in range(count)]
    return [Call(n, 0.0, Shape(64, 64, steps[n]), 1.0, 1, call_seed(0, n), "dummy") for n in range(count)]


def gaps(steps: Sequence[Step]) -> list[float]:
    """Idle seconds before each step from after the first full one to the last full one."""
    full = [index for index, step in enumerate(steps) if len(step.progress) == REQUESTS]
    return [step.idle_s for step in steps[full[0] + 1 : full[-1] + 1]] if full else []
