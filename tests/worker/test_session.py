"""The control link when the scheduler is another one than before: real sockets, no model."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from common import messages as m
from services.worker.session import Introduction, Session
from services.worker.step_thread import Boundary
from tests.builders import profile
from tests.worker.peers import DEADLINE_S, FakeScheduler, zmq_context

NEVER_S = 1_000.0  # no heartbeat comes by itself
LIMITS = m.WorkerLimits(max_num_seqs=2, max_residents=4)


class Credit:
    """Gateways that take everything."""

    stalled = False

    def close_unused(self) -> None:
        """There is nothing to close."""


class Held:
    """A table of residents that says what the test sets."""

    def __init__(self) -> None:
        self.step_index = 3

    def snapshot(self) -> tuple[m.Resident, ...]:
        return (m.Resident("r1", 1, "denoising", self.step_index, 9),)

    def on_boundary(self, boundary: Boundary) -> None:
        self.step_index = boundary.result.progress[0].step_index

    async def wait_until_empty(self) -> None:
        await asyncio.Event().wait()


class Steps:
    """A step thread that is busy."""

    idle = False

    def begin_epoch(self) -> None:
        """Plans count from anew."""


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Session, FakeScheduler]]:
    """A session that a scheduler has greeted."""
    async with zmq_context() as context:
        scheduler = FakeScheduler(context)
        introduction = Introduction("worker-1", profile(), m.StepCost(0.02, 1e-4), LIMITS, "cpu")
        session = Session(context, scheduler.address, introduction, Credit(), heartbeat_s=NEVER_S)
        session.residents, session.steps = Held(), Steps()  # type: ignore[assignment]
        running = asyncio.create_task(session.run())
        try:
            await scheduler.greeted()
            yield session, scheduler
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            session.close()
            scheduler.close()


async def restart(scheduler: FakeScheduler) -> m.WorkerHello:
    scheduler.boot_id = "boot-2"
    scheduler.send(m.Welcome("boot-2"))
    return await scheduler.greeted()


def boundary(step_index: int, boot_id: str) -> Boundary:
    result = m.StepResult("worker-1", boot_id, 7, progress=(m.Progress("r1", 1, step_index),))
    return Boundary(result, ())


async def test_a_step_of_an_earlier_schedulers_plan_is_told_to_the_new_one_at_once() -> None:
    async with serving() as (session, scheduler):
        assert (await restart(scheduler)).residents[0].step_index == 3
        session.on_boundary(boundary(4, "boot-1"))
        beat = await scheduler.first(m.WorkerHeartbeat)
        assert (beat.scheduler_boot_id, beat.residents[0].step_index) == ("boot-2", 4)
        assert scheduler.messages(m.StepResult) == []


async def test_a_step_of_the_present_schedulers_plan_is_told_by_its_result_alone() -> None:
    async with serving() as (session, scheduler):
        session.on_boundary(boundary(4, "boot-1"))
        assert (await scheduler.first(m.StepResult)).progress[0].step_index == 4
        assert scheduler.messages(m.WorkerHeartbeat) == []


async def test_a_draining_worker_tells_a_new_scheduler_so() -> None:
    async with serving() as (_, scheduler):
        scheduler.send(m.DrainWorker("boot-1", deadline_s=DEADLINE_S))
        await scheduler.first(m.WorkerDraining)
        await restart(scheduler)
        await scheduler.first(m.WorkerDraining, lambda draining: draining.scheduler_boot_id == "boot-2")
        kinds = [type(received.message) for received in scheduler.received]
        assert kinds[-2:] == [m.WorkerHello, m.WorkerDraining]
