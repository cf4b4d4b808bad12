"""Memory of gateway and scheduler: at rest, and after 10,000 requests.

How. A whole stack with a dummy model whose requests are one step of no time; resident set sizes are read when it has
become ready, after a tenth of the requests and after all. The growth is from the second to the third: what a process
needs once is in both. A scheduler remembers for ten minutes how requests ended, which is part of it.
"""

import psutil

from bench.budgets.measurement import Row
from bench.client import check_completed, connected
from bench.recording import Durations, Spec, command
from bench.stack import ONE_THREAD, Processes, Stack
from bench.workload import Call, Shape, call_seed
from services.demo.training.progress import steps as progress

BUDGET_MB = 120.0
GROWTH_MB = 10.0  # taken for none
CLIENTS = 32
PIECE = 250  # requests between two looks at how far it is


class Memory:
    """One run."""

    name = "memory"
    budget = "memory of gateway and scheduler: < 120 MB each at rest, no growth over 10,000 requests"

    def __init__(self, requests: int) -> None:
        self._requests = requests
        self._measured: list[dict[str, float]] = []  # MB by process: at rest, after a tenth, after all
        self._done = 0

    async def run(self) -> None:
        with Processes() as processes:
            stack = Stack(processes)
            spec = Spec(str(processes.folder / "steps"), Durations(step_s=0.0))
            stack.start_worker(command(spec), "--max-num-seqs", str(CLIENTS), *ONE_THREAD)
            await processes.until_ready(stack.url)
            self._measured = [_megabytes(stack)]
            pieces = max(1, self._requests // PIECE)
            async with connected(stack.url) as load:
                for piece in progress("memory", 0, pieces, {}):
                    load.results.clear()
                    await load.closed_loop(_calls(piece), CLIENTS)
                    check_completed(load.results)
                    self._done += PIECE
                    if piece == pieces // 10:
                        self._measured.append(_megabytes(stack))
                    elif piece > pieces // 10:
                        self._measured[2:] = [_megabytes(stack)]

    def row(self) -> Row | None:
        if len(self._measured) < 3:
            return None
        rest, tenth, end = self._measured
        texts = [f"{name}: {rest[name]:.0f} MB at rest, {end[name] - tenth[name]:+.1f} MB" for name in rest]
        return Row(
            name=self.name,
            budget=self.budget,
            measured=f"{'; '.join(texts)} over the last nine tenths of {self._done} requests",
            met=all(rest[name] < BUDGET_MB and end[name] - tenth[name] < GROWTH_MB for name in rest),
            figures={"at_rest_mb": rest, "after_a_tenth_mb": tenth, "at_the_end_mb": end, "requests": self._done},
        )


def _calls(piece: int) -> list[Call]:
    numbers = range(piece * PIECE, (piece + 1) * PIECE)
    return [Call(number, 0.0, Shape(64, 64, 1), 1.0, 1, call_seed(0, number), "dummy") for number in numbers]


def _megabytes(stack: Stack) -> dict[str, float]:
    """Resident set sizes."""
    processes = {"gateway": stack.gateway, "scheduler": stack.scheduler}
    return {name: psutil.Process(child.pid).memory_info().rss / 1e6 for name, child in processes.items()}
