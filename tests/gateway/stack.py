"""A scripted scheduler and a scripted worker on real sockets, and the real gateway between them and HTTP.

Everything a peer receives is kept until a test takes it with `expect`, which waits with a deadline.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import aiohttp
import zmq.asyncio

from common import codec
from common import messages as m
from common.config import GatewayConfig
from common.errors import ProtocolError
from common.params import DiffusionRequest
from common.transport import Link, SendOutcome, dealer, router
from services.gateway.app import serve_gateway
from services.gateway.links import LinkTiming
from tests.builders import WORKER, profile

T = TypeVar("T")

DEADLINE_S = 10.0
FAST = LinkTiming(
    tick_s=0.01,
    heartbeat_s=0.05,
    resend_s=0.1,
    silence_s=0.3,
    hello_again_s=0.2,
    alive_s=0.6,
    accept_s=1.0,
    gone_s=1.5,
)


async def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition that another task brings about."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


class Inbox:
    """What a link received, in order, until it is taken."""

    def __init__(self, link: Link[Any], on_message: Callable[[Any], None] = lambda message: None) -> None:
        self._link = link
        self._on_message = on_message
        self._messages: list[Any] = []
        self._news = asyncio.Condition()
        self._task = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        while True:
            received = await self._link.receive()
            self._on_message(received.message)
            async with self._news:
                self._messages.append(received.message)
                self._news.notify_all()

    async def expect(self, kind: type[T], where: Callable[[T], bool] = lambda message: True) -> T:
        """Takes the first message of that kind; the others stay."""

        def found() -> T | None:
            return next((one for one in self._messages if isinstance(one, kind) and where(one)), None)

        async with asyncio.timeout(DEADLINE_S), self._news:
            await self._news.wait_for(lambda: found() is not None)
            message = found()
            assert message is not None
            self._messages.remove(message)
            return message

    def count(self, kind: type[Any]) -> int:
        """How many of that kind are here and not taken."""
        return sum(isinstance(message, kind) for message in self._messages)

    def clear(self) -> None:
        self._messages.clear()

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._link.close()


class ScriptedScheduler:
    """Answers hellos like the real one; all else is the test's."""

    def __init__(self, context: zmq.asyncio.Context, address: str = "tcp://127.0.0.1:*", boot_id: str = "s1") -> None:
        self.models: tuple[m.ModelStatus, ...] = (m.ModelStatus(profile=profile(), workers=1),)
        self.boot_id = boot_id
        self.silent = False
        self.gateway_id = ""
        self._link = router(context, address, codec.to_scheduler, self._malformed)
        self.address = self._link.endpoint
        self.inbox = Inbox(self._link, self._on_message)
        self.expect = self.inbox.expect

    @staticmethod
    def _malformed(sender: str, error: ProtocolError) -> None:
        raise AssertionError(f"the gateway sent what is no message: {error}")

    def _on_message(self, message: Any) -> None:
        if self.silent:
            return
        self.gateway_id = message.gateway_id
        match message:
            case m.GatewayHello(scheduler_boot_id=self.boot_id):
                self._answer(self._models())
            case m.GatewayHello():
                self._answer(m.Welcome(scheduler_boot_id=self.boot_id))
            case m.GatewayHeartbeat(scheduler_boot_id=epoch) if epoch != self.boot_id:
                self._answer(m.Welcome(scheduler_boot_id=self.boot_id))

    def _answer(self, message: m.Message) -> None:
        self._link.send(message, to=self.gateway_id)  # the gateway may have left meanwhile

    def _models(self) -> m.ModelsUpdate:
        return m.ModelsUpdate(scheduler_boot_id=self.boot_id, models=self.models)

    def send(self, message: m.Message) -> None:
        assert self._link.send(message, to=self.gateway_id) is SendOutcome.SENT

    def tell_models(self) -> None:
        self.send(self._models())

    def update(self, request_id: str, status: m.RequestStatus, **fields: Any) -> None:
        self.send(m.RequestUpdate(request_id=request_id, status=status, **fields))

    async def accept(self) -> tuple[DiffusionRequest, ...]:
        """Takes the next submission and answers for it."""
        submit = await self.expect(m.SubmitRequests)
        for request in submit.requests:
            self.update(request.request_id, "waiting")
        return submit.requests

    async def close(self) -> None:
        await self.inbox.close()


class ScriptedWorker:
    """The data link of a worker."""

    def __init__(self, context: zmq.asyncio.Context, address: str, worker_id: str = WORKER) -> None:
        self.worker_id = worker_id
        self._link = dealer(context, address, worker_id, codec.data_to_worker, self._malformed)
        self.inbox = Inbox(self._link)
        self.expect = self.inbox.expect

    @staticmethod
    def _malformed(sender: str, error: ProtocolError) -> None:
        raise AssertionError(f"the gateway sent what is no message: {error}")

    def send(self, message: m.Message, payload: bytes | None = None) -> None:
        assert self._link.send(message, payload=payload) is SendOutcome.SENT

    def deliver(self, request: DiffusionRequest, payload: bytes | None = None, attempt: int = 1, **fields: Any) -> None:
        """Sends the picture of a request; without a payload one that tells requests apart."""
        payload = picture_of(request) if payload is None else payload
        image = m.ImageOutput(
            request_id=request.request_id,
            attempt=attempt,
            worker_id=self.worker_id,
            output_format=request.output.output_format,
            width=request.params.width,
            height=request.params.height,
            **({"nbytes": len(payload)} | fields),
        )
        self.send(image, payload)

    async def ack(self, request: DiffusionRequest) -> m.ImageAck:
        return await self.expect(m.ImageAck, lambda ack: ack.request_id == request.request_id)

    async def close(self) -> None:
        await self.inbox.close()


def picture_of(request: DiffusionRequest) -> bytes:
    return f"picture with seed {request.params.seed}".encode()


class RunningGateway:
    """The gateway under test and a client of it."""

    def __init__(self, url: str, task: asyncio.Task[None], session: aiohttp.ClientSession) -> None:
        self.url = url
        self.task = task
        self.session = session

    def post(self, body: Any = None, **arguments: Any) -> asyncio.Task[tuple[int, Any, Any]]:
        """Starts a generations call: status, JSON, headers."""
        if body is not None:
            arguments["json"] = body
        return asyncio.create_task(self.call("POST", "/v1/images/generations", **arguments))

    async def call(self, method: str, path: str, **arguments: Any) -> tuple[int, Any, Any]:
        async with self.session.request(method, self.url + path, **arguments) as response:
            return response.status, await response.json(), response.headers

    async def ready(self) -> None:
        """Waits until the gateway would serve a call."""
        async with asyncio.timeout(DEADLINE_S):
            while (await self.call("GET", "/health/ready"))[0] != 200:
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@contextlib.asynccontextmanager
async def running_gateway(
    scheduler_address: str, timing: LinkTiming | None = None, **config: Any
) -> AsyncIterator[RunningGateway]:
    """The real gateway on free ports."""
    settings = GatewayConfig(**({"port": 0, "scheduler": scheduler_address, "data_bind": "tcp://127.0.0.1:*"} | config))
    bound: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve_gateway(settings, bound.set_result, timing))
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.wait([bound, task], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        gateway = RunningGateway(bound.result(), task, session)
        try:
            yield gateway
        finally:
            await gateway.stop()
