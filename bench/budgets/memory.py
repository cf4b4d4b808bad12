"""Memory of gateway and scheduler: at rest, and over 10,000 requests.

How. A whole stack with a dummy model whose requests are one step of no time. Resident set sizes are read when it has
become ready, after so many requests, and after as many again. The growth is from the second to the third: what a
process needs once, such as the scheduler's memory of the newest 10,000 ends, is in both. Afterwards the metrics of all
three processes must say that they hold nothing.
"""

import asyncio
import time

import aiohttp
import psutil

from bench.budgets.measurement import Row
from bench.client import check_completed, connected
from bench.metrics_page import read_page, samples
from bench.recording import Durations, Spec, command
from bench.stack import ONE_THREAD, POLL_S, BenchError, Processes, Stack, free_port
from bench.workload import Call, Shape, call_seed
from services.demo.training.progress import steps as progress

BUDGET_MB = 120.0
GROWTH = 0.05  # taken for none
CLIENTS = 32
PIECE = 250  # requests between two looks at how far it is
EMPTY_S = 10.0  # for the last words on the last requests
TABLES = ("stepweave_gateway_pending_requests", "stepweave_scheduler_live_requests", "stepweave_worker_residents")


class Memory:
    """One run."""

    name = "memory"
    budget = "memory of gateway and scheduler: < 120 MB each at rest, flat within 5 % over 10,000, tables empty"

    def __init__(self, requests: int) -> None:
        self._requests = requests
        self._measured: list[dict[str, float]] = []  # MB by process: at rest, at half time, at the end
        self._held: float | None = None  # requests that any of the processes holds, when all have ended

    async def run(self) -> None:
        ports = {name: str(free_port()) for name in ("gateway", "scheduler", "worker")}
        flags = {name: ["--metrics-port", port] for name, port in ports.items()}
        with Processes() as processes:
            stack = Stack(processes, scheduler_flags=flags["scheduler"], gateway_flags=flags["gateway"])
            spec = Spec(str(processes.folder / "steps"), Durations(step_s=0.0))
            stack.start_worker(command(spec), "--max-num-seqs", str(CLIENTS), *ONE_THREAD, *flags["worker"])
            await processes.until_ready(stack.url)
            self._measured = [_megabytes(stack)]
            half = max(1, self._requests // PIECE)
            async with connected(stack.url) as load:
                for piece in progress("memory", 0, 2 * half):
                    load.results.clear()
                    await load.closed_loop(_calls(piece), CLIENTS)
                    check_completed(load.results)
                    if piece + 1 in (half, 2 * half):
                        self._measured.append(_megabytes(stack))
            self._held = await _held_at_last([f"http://127.0.0.1:{port}/metrics" for port in ports.values()])

    def row(self) -> Row | None:
        if self._held is None:
            return None
        rest, before, end = self._measured
        growth = {name: end[name] / before[name] - 1 for name in rest}
        texts = [f"{name}: {rest[name]:.0f} MB at rest, {100 * growth[name]:+.1f} %" for name in rest]
        return Row(
            name=self.name,
            budget=self.budget,
            measured=f"{'; '.join(texts)} over {self._requests} requests; {self._held:.0f} still held",
            met=all(rest[name] < BUDGET_MB and growth[name] < GROWTH for name in rest) and self._held == 0,
            figures={
                "at_rest_mb": rest,
                "before_mb": before,
                "after_mb": end,
                "requests": self._requests,
                "still_held": self._held,
            },
        )


def _calls(piece: int) -> list[Call]:
    numbers = range(piece * PIECE, (piece + 1) * PIECE)
    return [Call(number, 0.0, Shape(64, 64, 1), 1.0, 1, call_seed(0, number), "dummy") for number in numbers]


def _megabytes(stack: Stack) -> dict[str, float]:
    """Resident set sizes."""
    processes = {"gateway": stack.gateway, "scheduler": stack.scheduler}
    return {name: psutil.Process(child.pid).memory_info().rss / 1e6 for name, child in processes.items()}


async def _held_at_last(urls: list[str]) -> float:
    """How many requests the processes hold, once it is none or after a while."""
    end = time.monotonic() + EMPTY_S
    async with aiohttp.ClientSession() as session:
        while True:
            pages = [await read_page(session, url) for url in urls]
            found = [sample for page in pages for sample in samples(page) if sample.name in TABLES]
            if {sample.name for sample in found} != set(TABLES):
                raise BenchError(f"the processes do not tell {', '.join(TABLES)}")
            held = sum(sample.value for sample in found)
            if held == 0 or time.monotonic() > end:
                return held
            await asyncio.sleep(POLL_S)
