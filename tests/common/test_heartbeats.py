"""A peer that is stopped closes nothing: only the silence of its pings tells."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator

import pytest
import zmq.asyncio

from common import codec, transport
from common import messages as m
from common.transport import Link, SendOutcome

DEADLINE_S = 20.0

# A process with a DEALER for each address that it is given.
PEER = """
import sys, zmq
context = zmq.Context()
hello = bytes.fromhex(sys.argv[1])
sockets = []
for address in sys.argv[2:]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, b"peer")
    socket.connect(address)
    socket.send(hello)
    sockets.append(socket)
sys.stdin.buffer.read()
context.destroy(linger=0)
"""
HELLO = m.WorkerDraining(worker_id="peer", scheduler_boot_id="b")


def router(context: zmq.asyncio.Context) -> Link[m.ToScheduler]:
    return transport.router(context, "tcp://127.0.0.1:*", codec.to_scheduler, lambda *what: None)


@contextlib.asynccontextmanager
async def peer_of(*routers: Link[m.ToScheduler]) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process of its own whom all of `routers` have heard."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PEER,
        codec.encode(HELLO).hex(),
        *(router.endpoint for router in routers),
        stdin=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            for router in routers:
                assert (await router.receive()).message == HELLO
        yield process
    finally:
        process.kill()
        await process.wait()


def reach(router: Link[m.ToScheduler]) -> SendOutcome:
    return router.send(m.Welcome("b"), to="peer")


async def test_a_peer_that_is_stopped_is_unreachable_after_the_heartbeat_timeout_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = zmq.asyncio.Context()
    try:
        monkeypatch.setattr(transport, "HEARTBEAT_IVL_MS", 100)
        monkeypatch.setattr(transport, "HEARTBEAT_TIMEOUT_MS", 300)
        hasty = router(context)
        monkeypatch.setattr(transport, "HEARTBEAT_TIMEOUT_MS", 600_000)
        patient = router(context)
        async with peer_of(hasty, patient) as process:
            os.kill(process.pid, signal.SIGSTOP)
            async with asyncio.timeout(DEADLINE_S):
                while reach(hasty) is not SendOutcome.UNREACHABLE:
                    await asyncio.sleep(0.02)
            assert reach(patient) is SendOutcome.SENT
    finally:
        context.destroy(linger=0)
