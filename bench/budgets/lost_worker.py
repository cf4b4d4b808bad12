"""What becomes of a killed worker's requests.

How. Two workers with the real model write down each step that they run. In the midst of it one is killed without a
word. Every call must bring its picture. What both workers together ran of a request, beyond the steps that it has, was
done twice.
"""

import asyncio
import time
from collections import Counter
from pathlib import Path

from bench.budgets.measurement import Row
from bench.client import connected
from bench.recording import Spec, command, read_steps
from bench.report import spread
from bench.stack import ONE_THREAD, POLL_S, BenchError, Processes, Stack
from bench.workload import Mix, Mixes, Shape, draw_calls
from services.demo.training.progress import steps as progress

REQUESTS = 16
DEADLINE_S = 600.0


class LostWorker:
    """Several kills, each in a stack of its own."""

    name = "lost-worker"
    budget = "a killed worker's requests: all finish, each at most one checkpoint interval of steps later"

    def __init__(
        self, checkpoint: str, shape: Shape, guidance_scale: float, interval_steps: int | None, rounds: int
    ) -> None:
        self._checkpoint = checkpoint
        self._shape = shape
        self._guidance_scale = guidance_scale
        self._interval_steps = interval_steps  # None: not known, or there are no checkpoints
        self._rounds = rounds
        self._outcomes: Counter[str] = Counter()
        self._done_twice: list[int] = []  # steps, of each request that the killed worker had begun
        self._seconds: list[float] = []  # from the kill to the last picture

    async def run(self) -> None:
        for number in progress("lost worker", 0, self._rounds):
            await self._kill_one(number)

    async def _kill_one(self, number: int) -> None:
        with Processes() as processes:
            stack = Stack(processes)
            records = {name: processes.folder / f"{name}.steps" for name in ("worker-a", "worker-b")}
            workers = {
                name: stack.start_worker(
                    command(Spec(str(record))), "--model", self._checkpoint, *ONE_THREAD, name=name
                )
                for name, record in records.items()
            }
            await processes.until_ready(stack.url, workers=len(workers))
            mixes = Mixes(Mix((self._shape,), (1,)), Mix((self._guidance_scale,), (1,)), Mix((1,), (1,)))
            calls = draw_calls(number, [0.0] * REQUESTS, mixes)
            async with connected(stack.url, DEADLINE_S) as load:
                loading = asyncio.create_task(load.closed_loop(calls, REQUESTS))
                try:
                    await self._until_half_way(processes, records["worker-a"])
                    processes.kill(workers["worker-a"])
                    killed_at = time.perf_counter()
                    await loading
                    self._seconds.append(time.perf_counter() - killed_at)
                finally:
                    loading.cancel()
                    await asyncio.gather(loading, return_exceptions=True)
                self._outcomes.update(result.outcome for result in load.results)
            killed, other = (_steps_run(record) for record in records.values())
            steps = self._shape.num_inference_steps
            self._done_twice += [killed[request] + other[request] - steps for request in killed if request in other]

    async def _until_half_way(self, processes: Processes, record: Path) -> None:
        end = time.monotonic() + DEADLINE_S
        while max(_steps_run(record).values(), default=0) < self._shape.num_inference_steps // 2:
            processes.check()
            if time.monotonic() > end:
                raise BenchError(f"the worker did not get half-way within {DEADLINE_S:g} s")
            await asyncio.sleep(POLL_S)

    def row(self) -> Row | None:
        if not self._seconds:
            return None
        finished, all_of_them = self._outcomes["completed"], sum(self._outcomes.values())
        again = spread(self._done_twice) if self._done_twice else None
        at_most = f"{again.most:.0f} (median {again.median:.0f})" if again else "none"
        met = finished == all_of_them and again is not None
        if again is not None and self._interval_steps is not None:
            met = met and again.most <= self._interval_steps
        return Row(
            name=self.name,
            budget=self.budget,
            measured=f"{finished} of {all_of_them} finished; steps done twice: at most {at_most} of "
            f"{self._shape.num_inference_steps}; {spread(self._seconds).shown(1)} s from the kill to the last picture",
            met=met if self._interval_steps is not None or not met else None,
            figures={
                "outcomes": dict(self._outcomes),
                "steps_done_twice": again,
                "seconds": spread(self._seconds),
                "interval_steps": self._interval_steps,
            },
        )


def _steps_run(record: Path) -> Counter[str]:
    """How many steps the worker has run of each request."""
    return Counter(request_id for step in read_steps(record) for request_id in step.progress)
