"""Pictures to the gateways that wait for them: sent, and sent again until acknowledged.

Role: one DEALER for each gateway address, opened when needed and closed when long unused; credit, so that a gateway
that takes nothing holds up decoding instead of filling memory. It knows requests by id only, and no scheduler.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

import structlog
import zmq.asyncio

from common import codec, transport
from common.errors import ErrorInfo, ProtocolError, RequestError
from common.messages import DataToWorker, ImageAck, ImageOutput
from common.params import DataHome

log = structlog.get_logger()

RESEND_S = 1.0
DEADLINE_S = 60.0
CREDIT_BYTES = 64 * 1024 * 1024  # of pictures that one gateway has not acknowledged
UNUSED_S = 60.0

Key = tuple[str, int]  # request_id, attempt


class Delivery:
    """All data links of a worker. Belongs to one event loop."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        worker_id: str,
        *,
        resend_s: float = RESEND_S,
        deadline_s: float = DEADLINE_S,
        credit_bytes: int = CREDIT_BYTES,
        unused_s: float = UNUSED_S,
    ) -> None:
        self._context = context
        self._worker_id = worker_id
        self._resend_s = resend_s
        self._deadline_s = deadline_s
        self._credit_bytes = credit_bytes
        self._unused_s = unused_s
        self._links: dict[str, _GatewayLink] = {}  # by address
        self._opened = 0
        self._waiting = 0  # callers without credit
        self.acknowledged = 0  # pictures that a gateway has taken
        self.sent_again = 0  # sends of a picture after its first
        self.malformed = 0  # frames dropped, on all links that there ever were

    @property
    def stalled(self) -> bool:
        """Somebody waits for a gateway to take pictures."""
        return self._waiting > 0

    @property
    def open_links(self) -> int:
        return len(self._links)

    async def wait_for_credit(self, home: DataHome) -> None:
        """Waits until the gateway may be sent another picture. Raises `RequestError` `undelivered` at the deadline."""
        await self._acquire(self._link(home), 1)

    async def deliver(self, home: DataHome, output: ImageOutput, payload: bytes) -> None:
        """Returns when the gateway has the picture or wants it no more. Raises `RequestError` `undelivered`."""
        link = self._link(home)
        await self._acquire(link, len(payload))
        key = (output.request_id, output.attempt)
        done = asyncio.Event()
        link.under_way[key] = _UnderWay(len(payload), done)
        sent = False
        try:
            async with asyncio.timeout(self._deadline_s):
                while not done.is_set():
                    self.sent_again += sent
                    outcome = link.socket.send(output, payload=payload)
                    sent = sent or outcome is transport.SendOutcome.SENT
                    if outcome is not transport.SendOutcome.SENT:
                        log.debug("picture not sent yet", request_id=output.request_id, outcome=outcome.value)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(done.wait(), self._resend_s)
        except TimeoutError:
            raise _undelivered(self._deadline_s) from None
        else:
            self.acknowledged += 1
        finally:
            del link.under_way[key]
            link.used_at = time.monotonic()
            link.changed.set()

    async def _acquire(self, link: "_GatewayLink", nbytes: int) -> None:
        if link.has_credit(nbytes):
            return
        self._waiting += 1
        link.waiting += 1
        try:
            async with asyncio.timeout(self._deadline_s):
                while not link.has_credit(nbytes):
                    link.changed.clear()
                    await link.changed.wait()
        except TimeoutError:
            raise _undelivered(self._deadline_s) from None
        finally:
            self._waiting -= 1
            link.waiting -= 1

    def close_unused(self) -> None:
        """Closes links without a picture under way that have not been used for long. Call it now and then."""
        now = time.monotonic()
        for address, link in list(self._links.items()):
            if not link.in_use and now - link.used_at > self._unused_s:
                del self._links[address]
                link.close()

    def close(self) -> None:
        """Closes all links; what is under way is lost."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _link(self, home: DataHome) -> "_GatewayLink":
        link = self._links.get(home.address)
        if link is not None and link.broken:
            link.close()
            link = None
        if link is None:
            # A router may still hold the id of a link that was closed, and would ignore a second one under it.
            identity = self._worker_id if self._opened == 0 else f"{self._worker_id}.{self._opened}"
            self._opened += 1
            socket = transport.dealer(self._context, home.address, identity, codec.data_to_worker, self._on_malformed)
            link = _GatewayLink(socket, self._credit_bytes)
            self._links[home.address] = link
        return link

    def _on_malformed(self, _sender: str, error: ProtocolError) -> None:
        self.malformed += 1
        log.warning("malformed message on a data link", error=str(error))


@dataclass(slots=True)
class _UnderWay:
    nbytes: int
    done: asyncio.Event


@dataclass(slots=True)
class _GatewayLink:
    """One gateway: its socket, what it has not acknowledged, and the task that reads its answers."""

    socket: transport.Link[DataToWorker]
    credit_bytes: int
    under_way: dict[Key, _UnderWay] = field(default_factory=dict)
    waiting: int = 0  # callers without credit
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # for those that wait for credit: look again
    used_at: float = field(default_factory=time.monotonic)
    task: asyncio.Task[None] = field(init=False)

    def __post_init__(self) -> None:
        self.task = asyncio.create_task(self._receive())

    @property
    def broken(self) -> bool:
        """Its reader has ended by an error, which has been logged."""
        return self.task.done()

    @property
    def in_use(self) -> bool:
        return bool(self.under_way) or self.waiting > 0

    def has_credit(self, nbytes: int) -> bool:
        """A picture larger than all credit goes alone."""
        used = sum(item.nbytes for item in self.under_way.values())
        return used == 0 or used + nbytes <= self.credit_bytes

    def close(self) -> None:
        self.task.cancel()
        self.socket.close()

    async def _receive(self) -> None:
        try:
            while True:
                received = await self.socket.receive()
                if isinstance(received.message, ImageAck):
                    self._acknowledge(received.message)
                else:
                    log.debug("unexpected on a data link", message=type(received.message).__name__)
        except zmq.ZMQError as error:
            log.error("a data link broke", error=str(error))

    def _acknowledge(self, ack: ImageAck) -> None:
        if ack.credit_bytes > 0:
            self.credit_bytes = ack.credit_bytes
        item = self.under_way.get((ack.request_id, ack.attempt))
        if item is not None:
            item.done.set()
        self.changed.set()


def _undelivered(deadline_s: float) -> RequestError:
    message = f"the gateway did not take the picture within {deadline_s:g} s"
    return RequestError(ErrorInfo("undelivered", message))
