"""What the control link remembers of requests that nobody waits for, and for how long."""

import asyncio
import contextlib
import gc
import weakref
from typing import Any

from common import messages as m
from common.transport import Received, SendOutcome
from services.gateway.links import ControlLink, LinkTiming
from services.gateway.models import ModelTable
from services.gateway.pending import PendingCalls
from tests.gateway.stack import until

TIMING = LinkTiming(tick_s=0.0)


class FakeLink:
    """A link to a scheduler that is the test."""

    def __init__(self) -> None:
        self.sent: list[m.Message] = []
        self._inbox: asyncio.Queue[m.Message] = asyncio.Queue()

    def send(self, message: m.Message) -> SendOutcome:
        self.sent.append(message)
        return SendOutcome.SENT

    async def receive(self) -> Received[Any]:
        return Received("", await self._inbox.get(), memoryview(b""))

    def say(self, message: m.Message) -> None:
        self._inbox.put_nowait(message)

    def count(self, kind: type[m.Message]) -> int:
        return sum(isinstance(message, kind) for message in self.sent)


class Name(str):
    """A request id whose memory can be watched."""


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


async def test_an_abort_is_remembered_for_a_bounded_time() -> None:
    link, clock = FakeLink(), Clock()
    control = ControlLink(link, "gateway-1", PendingCalls(), ModelTable(), TIMING, clock)  # type: ignore[arg-type]
    name = Name("r1")
    held = weakref.ref(name)
    control.abort([name], "the client left")
    del name
    keeping_alive = asyncio.create_task(control.keep_alive())
    try:
        await until(lambda: link.count(m.GatewayHello) > 0)
        link.sent.clear()
        gc.collect()
        assert held() is not None
        clock.now += TIMING.gone_s + 1
        await until(lambda: link.count(m.GatewayHello) > 0)
        gc.collect()
        assert held() is None
    finally:
        keeping_alive.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping_alive


async def test_aborts_of_requests_that_the_scheduler_has_ended_are_forgotten_at_once() -> None:
    link, clock = FakeLink(), Clock()
    control = ControlLink(link, "gateway-1", PendingCalls(), ModelTable(), TIMING, clock)  # type: ignore[arg-type]
    name = Name("r1")
    held = weakref.ref(name)
    control.abort([name], "the client left")
    link.sent.clear()
    receiving = asyncio.create_task(control.receive())
    try:
        del name
        assert held() is not None
        link.say(m.RequestUpdate(request_id="r1", status="finished_aborted", attempt=1))
        await until(lambda: held() is None)
    finally:
        receiving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await receiving
