"""What the scheduler forgets in time, what it does not believe, and what it does after it overslept."""

import asyncio
import time
from typing import Any

import pytest

from common import messages as m
from common import transport
from common.errors import ErrorInfo
from services.scheduler import service
from services.scheduler.core import SchedulerCore
from services.scheduler.finished import FinishedRequests
from services.scheduler.service import SchedulerShell
from tests.builders import request, worker_hello
from tests.scheduler.driver import BOOT, Driver, members, plans, resident, serving, updates


def pass_time(driver: Driver, seconds: int) -> None:
    """Time in which nobody says more than that it is there."""
    for _ in range(seconds):
        driver.tick(1.0)
        driver.gateway_beats()
        driver.beats()


def test_a_finished_request_is_forgotten_in_time_although_nothing_new_is_submitted() -> None:
    driver = serving(finished_for_s=10.0)
    driver.submit(request("r1"))
    driver.done("r1", error=ErrorInfo("internal", "as the test wanted"))
    pass_time(driver, 9)
    assert "r1" in driver.core.book.finished
    pass_time(driver, 4)
    assert len(driver.core.book.finished) == 0


def test_the_first_of_two_ends_is_remembered_and_both_are_forgotten() -> None:
    finished = FinishedRequests(for_s=10.0, most=2)
    finished.remember(m.RequestUpdate("r1", "finished_completed", 1, "one"), 0.0)
    finished.remember(m.RequestUpdate("r1", "finished_completed", 2, "two"), 5.0)
    finished.remember(m.RequestUpdate("r2", "finished_aborted"), 6.0)
    kept = finished.get("r1")
    assert kept is not None
    assert kept.update("r1") == m.RequestUpdate("r1", "finished_completed", 1, "one")
    finished.forget(10.0)
    assert ("r1" in finished, "r2" in finished) == (False, True)
    finished.forget(16.0)
    assert len(finished) == 0


def test_a_plan_from_before_an_attempt_cannot_have_skipped_it() -> None:
    driver = serving()
    driver.submit(request("r1", num_inference_steps=9))
    (old, *_) = plans(driver.ready("r1"))
    (again,) = plans(driver.result(old.step_id, skipped=("r1",)))
    assert [(new.request.request_id, new.attempt) for new in again.new] == [("r1", 2)]
    driver.beats(resident("r1", "preparing", attempt=2))
    (first, *_) = plans(driver.ready("r1", attempt=2))
    assert (members(first), driver.status("r1")) == ({"r1": 1}, "running")

    assert updates(driver.result(old.step_id, skipped=("r1",))) == []
    live = driver.core.book.live["r1"]
    assert (live.status, live.attempt) == ("running", 2)
    # A plan that can have meant this attempt is believed.
    assert ("r1", "waiting") in updates(driver.result(first.step_id, skipped=("r1",)))


class Unreachable:
    """A link on which nobody is there."""

    def send(self, message: m.Message, *, to: str = "") -> transport.SendOutcome:
        return transport.SendOutcome.UNREACHABLE


class TestIsOver(Exception):  # noqa: N818 (it is no error)
    """Ends a loop that has no end."""

    __test__ = False


class Clock:
    """Stands in for `time` and `asyncio` in the shell: sleeping moves the clock, and each nap may be made longer."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.naps: list[Any] = []  # what happens in each sleep: called with the clock moved on

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        if not self.naps:
            raise TestIsOver
        self.naps.pop(0)()

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name, None) or getattr(time, name)


async def test_after_it_overslept_peers_get_to_be_heard_before_their_silence_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(service, "time", clock)
    monkeypatch.setattr(service, "asyncio", clock)
    core = SchedulerCore(BOOT)
    shell = SchedulerShell(core, Unreachable())  # type: ignore[arg-type]
    shell.handle(worker_hello("worker-1", scheduler_boot_id=BOOT))
    shell.handle(worker_hello("worker-gone", scheduler_boot_id=BOOT))

    def oversleep() -> None:
        clock.now += 60.0

    def hear_what_was_unread() -> None:
        shell.handle(m.WorkerHeartbeat("worker-1", BOOT, core.fleet.workers["worker-1"].newest_step_id, True))

    clock.naps = [oversleep, hear_what_was_unread, lambda: None, lambda: None]
    with pytest.raises(TestIsOver):
        await shell.keep_time()
    assert set(core.fleet.workers) == {"worker-1"}
    assert not core.fleet.workers["worker-1"].suspect
    assert shell.counts["core_error"] == 0
