"""Job threads: outcomes come back to the loop, and nobody waits for a job that is not wanted."""

import asyncio
import threading

import pytest

from services.worker.jobs import JobThreads

DEADLINE_S = 20.0


async def test_results_and_errors_come_back_to_the_loop() -> None:
    jobs = JobThreads("test")
    assert await jobs.run(lambda a, b: a + b, 1, 2) == 3
    with pytest.raises(ZeroDivisionError):
        await jobs.run(lambda: 1 / 0)
    jobs.close(DEADLINE_S)


async def test_a_job_that_is_cancelled_before_it_starts_is_not_run() -> None:
    jobs = JobThreads("test")
    started, go = threading.Event(), threading.Event()
    ran: list[str] = []

    def first() -> None:
        started.set()
        assert go.wait(DEADLINE_S)

    running = asyncio.create_task(jobs.run(first))
    async with asyncio.timeout(DEADLINE_S):
        while not started.is_set():
            await asyncio.sleep(0)
    queued = asyncio.create_task(jobs.run(ran.append, "unwanted"))
    await asyncio.sleep(0)  # it is in the queue now
    queued.cancel()
    await asyncio.gather(queued, return_exceptions=True)
    go.set()
    await asyncio.wait_for(running, DEADLINE_S)
    await asyncio.wait_for(jobs.run(ran.append, "wanted"), DEADLINE_S)
    assert ran == ["wanted"]
    jobs.close(DEADLINE_S)
