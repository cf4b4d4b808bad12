"""The whole stack at saturation, against the bare batched loop.

How. Worker and bare loop share one core, with one torch thread each; gateway, scheduler and clients have the other
cores. The loop does the same encoding, decoding and PNG work. Both are loaded once and measured by turns, in an order
that changes with every pair; the figure is the median of the pairs' ratios.
"""

import asyncio
import subprocess

from bench.budgets.measurement import Row
from bench.client import check_completed, connected
from bench.report import Window, spread, summarize
from bench.stack import ONE_THREAD, WORKER, BenchError, Processes, Stack, on_cores, split_cores
from bench.workload import Mix, Mixes, Shape, draw_calls
from services.demo.training.progress import steps as progress

BUDGET = 0.95
BATCH = 8
CLIENTS = 2 * BATCH


class Saturation:
    """Several pairs."""

    name = "saturation"
    budget = "whole stack at saturation: at least 0.95 of the bare batched loop's images/s"

    def __init__(self, checkpoint: str, shape: Shape, guidance_scale: float, images: int, pairs: int) -> None:
        self._checkpoint = checkpoint
        self._shape = shape
        self._guidance_scale = guidance_scale
        self._batches = max(1, images // BATCH)
        self._pairs = pairs
        self._stack: list[float] = []  # images/s of each pair
        self._bare: list[float] = []

    async def run(self) -> None:
        worker_core, other_cores = split_cores()
        with on_cores(other_cores), Processes() as processes:
            arguments = [self._checkpoint, str(self._shape), str(self._guidance_scale), str(BATCH), "1"]
            bare = processes.start("bare loop", ["bench.bare_loop", *arguments], worker_core, pipes=True)
            stack = Stack(processes, other_cores)
            flags = ["--model", self._checkpoint, "--max-num-seqs", str(BATCH), "--max-residents", str(CLIENTS)]
            stack.start_worker(WORKER, *flags, *ONE_THREAD, cores=worker_core)
            await _answer(processes, bare)
            await processes.until_ready(stack.url)
            figures: dict[str, float] = {}
            for number in progress("saturation", 0, self._pairs, figures):
                if number % 2:
                    bare_rate = await self._bare_rate(processes, bare)
                    stack_rate = await self._stack_rate(stack.url, number)
                else:
                    stack_rate = await self._stack_rate(stack.url, number)
                    bare_rate = await self._bare_rate(processes, bare)
                self._stack.append(stack_rate)
                self._bare.append(bare_rate)
                figures.update(stack=stack_rate, bare=bare_rate, ratio=stack_rate / bare_rate)

    async def _bare_rate(self, processes: Processes, bare: subprocess.Popen[bytes]) -> float:
        assert bare.stdin is not None
        bare.stdin.write(f"{self._batches}\n".encode())
        bare.stdin.flush()
        return self._batches * BATCH / float(await _answer(processes, bare))

    async def _stack_rate(self, url: str, number: int) -> float:
        """Images/s of a closed loop while all its clients are at work. All calls have ended when this returns."""
        images = self._batches * BATCH
        mixes = Mixes(Mix((self._shape,), (1,)), Mix((self._guidance_scale,), (1,)), Mix((1,), (1,)))
        calls = draw_calls(number, [0.0] * (CLIENTS + images + CLIENTS), mixes)
        async with connected(url) as load:
            await load.closed_loop(calls, CLIENTS)
        check_completed(load.results)
        rate = summarize(load.results, Window(CLIENTS, CLIENTS + images), closed=True).images_s
        assert rate is not None
        return rate

    def row(self) -> Row | None:
        if not self._bare:
            return None
        ratio = spread([stack / bare for stack, bare in zip(self._stack, self._bare, strict=True)])
        stack, bare = spread(self._stack), spread(self._bare)
        rates = f"{stack.shown()} against {bare.shown()} images/s"
        return Row(
            name=self.name,
            budget=self.budget,
            measured=f"{ratio.shown(3)} of it, {len(self._bare)} pairs: {rates}",
            met=ratio.median >= BUDGET,
            figures={"ratio": ratio, "stack_images_s": stack, "bare_images_s": bare},
        )


async def _answer(processes: Processes, child: subprocess.Popen[bytes]) -> str:
    """The next line that the child says."""
    assert child.stdout is not None
    line = await asyncio.to_thread(child.stdout.readline)
    if not line:
        child.wait()
        processes.check()
        raise BenchError("the bare loop ended")
    return line.decode().strip()
