"""The worker's peers, as real sockets that a test reads and writes by hand."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import zmq.asyncio

from common import codec, transport
from common import messages as m
from common.params import DataHome

T = TypeVar("T")

DEADLINE_S = 30.0


class Peer:
    """A ROUTER that keeps all that it receives."""

    def __init__(self, context: zmq.asyncio.Context, decoder: codec.Decoder[Any]) -> None:
        self.link = transport.router(context, "tcp://127.0.0.1:*", decoder, self._on_malformed)
        self.address = self.link.endpoint
        self.received: list[transport.Received[Any]] = []
        self._arrived = asyncio.Event()
        self.task = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        while True:
            received = await self.link.receive()
            payload = memoryview(bytes(received.payload))
            self.received.append(received._replace(payload=payload))
            self.on_message(received)
            self._arrived.set()

    def on_message(self, received: transport.Received[Any]) -> None:
        """What a peer does at once with a message; nothing."""

    def messages(self, kind: type[T]) -> list[T]:
        return [received.message for received in self.received if isinstance(received.message, kind)]

    async def until(self, condition: Callable[[], T]) -> T:
        """Waits until `condition()` is true; returns it."""
        async with asyncio.timeout(DEADLINE_S):
            while not (value := condition()):
                self._arrived.clear()
                await self._arrived.wait()
        return value

    async def first(self, kind: type[T], condition: Callable[[T], object] = lambda _: True) -> T:
        """The first message of a kind that meets the condition, which may have come already."""
        return (await self.until(lambda: [message for message in self.messages(kind) if condition(message)]))[0]

    def close(self) -> None:
        self.task.cancel()
        self.link.close()

    def _on_malformed(self, sender: str, error: Exception) -> None:
        raise AssertionError(f"{sender} sent no message: {error}")


class FakeScheduler(Peer):
    """Welcomes whoever comes, and then does what the test says."""

    def __init__(self, context: zmq.asyncio.Context, boot_id: str = "boot-1") -> None:
        super().__init__(context, codec.to_scheduler)
        self.boot_id = boot_id
        self.step_id = 0
        self.worker_id = ""

    def on_message(self, received: transport.Received[Any]) -> None:
        if isinstance(received.message, m.WorkerHello):
            self.worker_id = received.sender
            if received.message.scheduler_boot_id != self.boot_id:
                self.send(m.Welcome(self.boot_id))

    def send(self, message: m.Message) -> None:
        assert self.link.send(message, to=self.worker_id) is transport.SendOutcome.SENT

    async def greeted(self) -> m.WorkerHello:
        """The worker's hello to this epoch."""
        return await self.first(m.WorkerHello, lambda hello: hello.scheduler_boot_id == self.boot_id)

    def plan(self, *groups: m.Group, **fields: Any) -> m.StepPlan:
        """Sends a new plan."""
        self.step_id += 1
        plan = m.StepPlan(self.boot_id, self.step_id, groups, **fields)
        self.send(plan)
        return plan


class FakeGateway(Peer):
    """A data home. It acknowledges pictures unless told not to."""

    def __init__(self, context: zmq.asyncio.Context, acknowledges: bool = True) -> None:
        super().__init__(context, codec.data_to_gateway)
        self.acknowledges = acknowledges
        self.home = DataHome(gateway_id="gateway-test", address=self.address)

    def on_message(self, received: transport.Received[Any]) -> None:
        if self.acknowledges and isinstance(received.message, m.ImageOutput):
            self.acknowledge(received)

    def acknowledge(self, received: transport.Received[Any], credit_bytes: int = 0) -> None:
        output = received.message
        ack = m.ImageAck(output.request_id, output.attempt, known=True, credit_bytes=credit_bytes)
        assert self.link.send(ack, to=received.sender) is transport.SendOutcome.SENT

    def pictures(self, request_id: str) -> list[bytes]:
        return [
            bytes(received.payload)
            for received in self.received
            if isinstance(received.message, m.ImageOutput) and received.message.request_id == request_id
        ]


@contextlib.asynccontextmanager
async def zmq_context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


def group(*members: tuple[str, int], attempt: int = 1) -> m.Group:
    """A group of (request_id, until_step)."""
    return m.Group(tuple(m.PlannedRequest(request_id, attempt, until_step) for request_id, until_step in members))
