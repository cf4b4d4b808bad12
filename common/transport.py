"""ZeroMQ, and nothing else that does.

Role: one socket, its marks and sizes, frames to messages and back. A send never blocks: its outcome is a fact about the
peer, returned to the caller. A frame that is no message is counted, reported and dropped; receiving goes on.

A ROUTER binds and knows its peers by id; a DEALER connects and has one peer. Frames after the routing id are: the
message, and one payload where its type has one.
"""

import asyncio
import enum
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import zmq
import zmq.asyncio

from common import codec
from common.errors import ConfigError, ProtocolError
from common.messages import Message

M = TypeVar("M")

HEARTBEAT_IVL_MS = 1_000  # ZMTP ping, so that a peer that vanished without a FIN is noticed
HEARTBEAT_TIMEOUT_MS = 5_000
MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # one frame; a larger one disconnects its sender
SEND_HWM = 1_000  # messages to one peer
RECEIVE_HWM = 10_000
FLUSH_MS = 500  # how long a closing socket may take to send its last words


class SendOutcome(enum.Enum):
    """What became of a send."""

    SENT = "sent"  # handed to ZeroMQ; not proof that it arrived
    UNREACHABLE = "unreachable"  # no such peer is connected
    FULL = "full"  # the peer does not read: its high-water mark is reached


class Received(NamedTuple, Generic[M]):
    """One message that came in."""

    sender: str  # the routing id; empty on a DEALER
    message: M
    payload: memoryview  # empty where the message has none


class Link(Generic[M]):
    """A socket that receives the messages `M`. Make one with `router` or `dealer`; it belongs to one event loop."""

    def __init__(
        self,
        socket: zmq.asyncio.Socket,
        decoder: codec.Decoder[M],
        on_malformed: Callable[[str, ProtocolError], None],
    ) -> None:
        self._socket = socket
        self._decoder = decoder
        self._on_malformed = on_malformed
        self._is_router = socket.type == zmq.ROUTER
        self.malformed = 0  # frames dropped because they were no message for this receiver

    @property
    def endpoint(self) -> str:
        """The address last bound or connected, with the port that a wildcard became."""
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.rstrip(b"\0").decode()

    def send(self, message: Message, *, to: str = "", payload: bytes | memoryview | None = None) -> SendOutcome:
        """Sends now or says why not. `to` is the routing id of the peer on a router, and absent on a dealer.

        The payload is not copied: it must not change until the peer has answered.
        """
        frames: list[bytes | memoryview] = [to.encode()] if self._is_router else []
        frames.append(codec.encode(message))
        if payload is not None:
            frames.append(payload)
        # With NOBLOCK the future is done on return: zmq.asyncio resolves such sends at once.
        future = self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
        assert isinstance(future, asyncio.Future)
        try:
            future.result()
        except zmq.Again:
            return SendOutcome.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return SendOutcome.UNREACHABLE
            raise
        return SendOutcome.SENT

    async def receive(self) -> Received[M]:
        """The next message. Malformed ones are counted and reported on the way."""
        while True:
            parts = await self._socket.recv_multipart(copy=False)
            received = self._parse([part.buffer for part in parts])
            if received is not None:
                return received

    def _parse(self, frames: list[memoryview]) -> Received[M] | None:
        sender = ""
        try:
            if self._is_router:
                sender = _routing_id(bytes(frames[0]))
                frames = frames[1:]
            if not 1 <= len(frames) <= 2:
                raise ProtocolError(f"expected a message and at most one payload, got {len(frames)} frames")
            message = self._decoder.decode(frames[0])
        except ProtocolError as error:
            self.malformed += 1
            self._on_malformed(sender, error)
            return None
        return Received(sender, message, frames[1] if len(frames) == 2 else memoryview(b""))

    def close(self) -> None:
        """Closes the socket; what was sent last may still go out for `FLUSH_MS`."""
        self._socket.close(linger=FLUSH_MS)


def router(
    context: zmq.asyncio.Context,
    bind: str,
    decoder: codec.Decoder[M],
    on_malformed: Callable[[str, ProtocolError], None],
) -> Link[M]:
    """A bound ROUTER. Raises `ConfigError` if the address can't be bound."""
    socket = _socket(context, zmq.ROUTER)
    # Without it a ROUTER drops what it sends to an unknown peer, without a word.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # A peer whose connection died on its own side only comes back while the old one still looks alive. Without this its
    # new connection would be ignored for ever. Ids are drawn anew at each boot, so it is the same peer.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    try:
        socket.bind(bind)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(f"can't listen on {bind}: {error.strerror or error}") from error
    return Link(socket, decoder, on_malformed)


def dealer(
    context: zmq.asyncio.Context,
    connect: str,
    identity: str,
    decoder: codec.Decoder[M],
    on_malformed: Callable[[str, ProtocolError], None],
) -> Link[M]:
    """A DEALER that connects, and connects again, to one router. Raises `ConfigError` if `connect` is no address."""
    socket = _socket(context, zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, identity.encode())
    try:
        socket.connect(connect)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(f"{connect!r} is no address to connect to: {error.strerror or error}") from error
    return Link(socket, decoder, on_malformed)


def _socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, SEND_HWM)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_IVL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)  # so that a peer that starts again is found within a second
    return socket


def _routing_id(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError("routing id is not text") from error
