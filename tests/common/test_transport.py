"""Real sockets: what a send reports, and what receiving survives."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio

from common import codec, transport
from common import messages as m
from common.errors import ConfigError, ProtocolError
from common.transport import Link, SendOutcome

DEADLINE_S = 10.0
DRAINING = m.WorkerDraining(worker_id="w", scheduler_boot_id="b")


class Pair(msgspec.Struct):
    """A router and a dealer called `w` that is connected to it."""

    context: zmq.asyncio.Context
    router: Link[m.ToScheduler]
    dealer: Link[m.ToWorker]
    malformed: list[tuple[str, ProtocolError]]

    def connect(self, identity: str) -> Link[m.ToWorker]:
        return transport.dealer(
            self.context, self.router.endpoint, identity, codec.to_worker, lambda *what: self.malformed.append(what)
        )


@asynccontextmanager
async def connected() -> AsyncIterator[Pair]:
    context = zmq.asyncio.Context()
    malformed: list[tuple[str, ProtocolError]] = []
    router = transport.router(context, "tcp://127.0.0.1:*", codec.to_scheduler, lambda *what: malformed.append(what))
    dealer = transport.dealer(context, router.endpoint, "w", codec.to_worker, lambda *what: malformed.append(what))
    try:
        dealer.send(DRAINING)
        assert (await router.receive()).message == DRAINING
        yield Pair(context, router, dealer, malformed)
    finally:
        context.destroy(linger=0)


async def received(link: Link[m.ToScheduler] | Link[m.ToWorker]) -> object:
    async with asyncio.timeout(DEADLINE_S):
        return (await link.receive()).message


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0)


async def test_a_router_learns_the_sender_and_reaches_it() -> None:
    async with connected() as pair:
        pair.dealer.send(DRAINING, payload=b"bytes")
        got = await pair.router.receive()
        assert (got.sender, got.message, bytes(got.payload)) == ("w", DRAINING, b"bytes")
        assert pair.router.send(m.Welcome("b"), to="w") is SendOutcome.SENT
        assert await received(pair.dealer) == m.Welcome("b")


async def test_an_unknown_peer_is_a_fact_not_a_silent_loss() -> None:
    async with connected() as pair:
        assert pair.router.send(m.Welcome("b"), to="nobody") is SendOutcome.UNREACHABLE


async def test_a_peer_that_left_becomes_unreachable() -> None:
    async with connected() as pair:
        pair.dealer.close()
        await until(lambda: pair.router.send(m.Welcome("b"), to="w") is SendOutcome.UNREACHABLE)


async def test_a_stalled_peer_is_full_at_its_mark_and_delays_nobody() -> None:
    async with connected() as pair:
        other = pair.connect("other")
        other.send(DRAINING)
        await received(pair.router)
        ballast = bytes(256 * 1024)  # so that the kernel's buffers don't hide the mark for long
        outcomes = []
        for _ in range(20 * transport.SEND_HWM):
            outcomes.append(pair.router.send(m.Welcome("b"), to="w", payload=ballast))  # "w" never reads
            if outcomes[-1] is SendOutcome.FULL:
                break
        assert outcomes[-1] is SendOutcome.FULL
        assert pair.router.send(m.Welcome("b"), to="other") is SendOutcome.SENT
        assert await received(other) == m.Welcome("b")


@pytest.mark.parametrize(
    "frames",
    [[b"garbage"], [b""], [codec.encode(m.Welcome("b"))], [codec.encode(DRAINING), b"payload", b"one too many"]],
)
async def test_a_malformed_message_is_counted_and_the_next_one_arrives(frames: list[bytes]) -> None:
    async with connected() as pair:
        raw = pair.context.socket(zmq.DEALER)
        raw.setsockopt(zmq.ROUTING_ID, b"raw")
        raw.connect(pair.router.endpoint)
        await raw.send_multipart(frames)
        await raw.send_multipart([codec.encode(DRAINING)])
        assert await received(pair.router) == DRAINING
        assert pair.router.malformed == 1
        assert pair.malformed[0][0] == "raw"


async def test_a_routing_id_that_is_no_text_is_malformed() -> None:
    async with connected() as pair:
        raw = pair.context.socket(zmq.DEALER)
        raw.setsockopt(zmq.ROUTING_ID, b"\xff\xfe")
        raw.connect(pair.router.endpoint)
        await raw.send_multipart([codec.encode(DRAINING)])
        async with asyncio.timeout(DEADLINE_S):
            while pair.router.malformed == 0:  # the two peers are not ordered with each other
                pair.dealer.send(DRAINING)
                assert await received(pair.router) == DRAINING


async def test_a_frame_over_the_size_limit_disconnects_its_sender_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_MESSAGE_BYTES", 1024)
    async with connected() as pair:
        raw = pair.context.socket(zmq.DEALER)
        raw.setsockopt(zmq.ROUTING_ID, b"raw")
        raw.connect(pair.router.endpoint)
        await raw.send_multipart([bytes(4096)])
        pair.dealer.send(DRAINING)
        assert await received(pair.router) == DRAINING
        assert pair.router.malformed == 0


async def test_an_address_in_use_is_a_config_error_that_names_it() -> None:
    async with connected() as pair:
        with pytest.raises(ConfigError, match=pair.router.endpoint):
            transport.router(pair.context, pair.router.endpoint, codec.to_scheduler, lambda *what: None)


async def test_no_address_is_a_config_error() -> None:
    async with connected() as pair:
        with pytest.raises(ConfigError, match="nonsense"):
            transport.dealer(pair.context, "nonsense", "x", codec.to_worker, lambda *what: None)


async def test_a_peer_whose_connection_died_on_its_own_side_only_is_heard_again() -> None:
    """As behind a NAT or a firewall that forgot the connection: the router still holds the old one."""
    async with connected() as pair:
        port = int(pair.router.endpoint.rpartition(":")[2])
        cut: list[asyncio.StreamWriter] = []

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)

            async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while data := await source.read(65536):
                    if writer in cut:
                        break
                    sink.write(data)
                await asyncio.Event().wait()  # neither side is closed by this proxy

            live.append(writer)
            tasks.extend(asyncio.ensure_future(pump(*ends)) for ends in ((reader, far_writer), (far_reader, writer)))

        live: list[asyncio.StreamWriter] = []
        tasks: list[asyncio.Future[None]] = []
        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        peer = transport.dealer(pair.context, address, "far", codec.to_worker, lambda *what: None)
        peer.send(DRAINING)
        assert await received(pair.router) == DRAINING
        cut.extend(live)
        live[0].transport.abort()
        again = m.WorkerDraining(worker_id="far", scheduler_boot_id="after")
        heard = asyncio.ensure_future(received(pair.router))
        async with asyncio.timeout(DEADLINE_S):
            while not heard.done():  # what goes into the dying connection is lost
                peer.send(again)
                await asyncio.wait([heard], timeout=0.05)
            assert heard.result() == again
        assert pair.router.send(m.Welcome("b"), to="far") is SendOutcome.SENT
        assert await received(peer) == m.Welcome("b")
        for task in tasks:
            task.cancel()
        server.close()
