"""The shell, over real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zmq
import zmq.asyncio
from structlog.testing import capture_logs

from common import codec, transport
from common import messages as m
from common.config import SchedulerConfig
from common.errors import ConfigError, ProtocolError
from common.params import DataHome
from services.scheduler.core import SchedulerCore
from services.scheduler.service import SchedulerShell, serve_scheduler
from tests.builders import gateway_hello, request, submit, worker_hello

DEADLINE_S = 10.0
CONFIG = SchedulerConfig(bind="tcp://127.0.0.1:*")


def raise_malformed(sender: str, error: ProtocolError) -> None:
    raise AssertionError(f"malformed message from the scheduler: {error}")


class Peer:
    """A DEALER under a routing id of its own."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, identity: str, decoder: codec.Decoder[Any]) -> None:
        self.identity = identity
        self.link = transport.dealer(context, endpoint, identity, decoder, raise_malformed)

    def send(self, message: m.Message) -> None:
        assert self.link.send(message) is transport.SendOutcome.SENT

    async def receive(self) -> Any:
        return (await asyncio.wait_for(self.link.receive(), DEADLINE_S)).message

    async def receive_until(self, kind: type) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            while not isinstance(message := await self.receive(), kind):
                pass
        return message


class Stage:
    """A running scheduler, and peers of it."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self._context = context
        self._endpoint = endpoint
        self.peers: list[Peer] = []

    def gateway(self, identity: str = "gateway-1") -> Peer:
        return self._peer(identity, codec.to_gateway)

    def worker(self, identity: str = "worker-1") -> Peer:
        return self._peer(identity, codec.to_worker)

    def _peer(self, identity: str, decoder: codec.Decoder[Any]) -> Peer:
        self.peers.append(Peer(self._context, self._endpoint, identity, decoder))
        return self.peers[-1]

    def raw(self, identity: bytes) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, identity)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._endpoint)
        return socket


@contextlib.asynccontextmanager
async def serving(config: SchedulerConfig = CONFIG) -> AsyncIterator[Stage]:
    bound: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve_scheduler(config, bound.set_result))
    context = zmq.asyncio.Context()
    try:
        stage = Stage(context, await asyncio.wait_for(bound, DEADLINE_S))
        yield stage
        for peer in stage.peers:
            peer.link.close()
        assert not server.done(), server
    finally:
        server.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await server
        context.destroy(linger=0)


async def test_an_unknown_peer_is_welcomed() -> None:
    async with serving() as stage:
        gateway = stage.gateway()
        gateway.send(m.GatewayHeartbeat("gateway-1", "an-earlier-epoch"))
        welcome = await gateway.receive()
        assert isinstance(welcome, m.Welcome)
        assert welcome.scheduler_boot_id


async def test_a_request_goes_through_from_submission_to_completion() -> None:
    async with serving() as stage:
        gateway, worker = stage.gateway(), stage.worker()
        worker.send(worker_hello("worker-1"))
        epoch = (await worker.receive_until(m.StepPlan)).scheduler_boot_id
        gateway.send(gateway_hello("gateway-1"))
        assert (await gateway.receive_until(m.ModelsUpdate)).models[0].workers == 1
        asked = request("r1", home=DataHome("gateway-1", "tcp://127.0.0.1:1"), num_inference_steps=1)
        gateway.send(submit(asked, gateway_id="gateway-1"))
        plan = await worker.receive_until(m.StepPlan)
        assert plan.new == (m.NewRequest(asked, 1),)
        worker.send(m.RequestReady("worker-1", "r1", 1, 0, 1, last_step_id=plan.step_id))
        plan = await worker.receive_until(m.StepPlan)
        assert plan.groups == (m.Group((m.PlannedRequest("r1", 1, 1),)),)
        progress = (m.Progress("r1", 1, 1),)
        worker.send(m.StepResult("worker-1", epoch, plan.step_id, progress, plan_done=True, last_step_id=plan.step_id))
        worker.send(m.RequestDone("worker-1", "r1", 1, "completed"))
        seen: list[str] = []
        while not seen or seen[-1] != "finished_completed":
            seen.append((await gateway.receive_until(m.RequestUpdate)).status)
        assert seen == ["waiting", "preparing", "ready", "running", "decoding", "finished_completed"]


async def test_silence_is_noticed_without_any_message() -> None:
    config = SchedulerConfig(bind="tcp://127.0.0.1:*", suspect_after_s=0.05, lost_after_s=0.1)
    async with serving(config) as stage:
        gateway, worker = stage.gateway(), stage.worker()
        worker.send(worker_hello("worker-1"))
        epoch = (await worker.receive_until(m.StepPlan)).scheduler_boot_id
        async with asyncio.timeout(DEADLINE_S):
            while True:
                # The gateway may be held for lost too, so it says hello each time that it asks.
                gateway.send(gateway_hello("gateway-1", scheduler_boot_id=epoch))
                update = await gateway.receive_until(m.ModelsUpdate)
                if not any(status.workers for status in update.models):
                    break
                await asyncio.sleep(0)  # so that the deadline above gets its turn


@pytest.mark.parametrize(
    "frames",
    [[b"not a message"], [b"\x81\xa4type\xa7unknown"], [b""], [b"a", b"b", b"c"], [codec.encode(m.Welcome("x"))]],
    ids=["noise", "unknown tag", "empty", "too many frames", "for another receiver"],
)
async def test_a_malformed_message_is_survived(frames: list[bytes]) -> None:
    async with serving() as stage:
        raw = stage.raw(b"stranger")
        with capture_logs() as logs:
            await raw.send_multipart(frames)
            worker = stage.worker()
            async with asyncio.timeout(DEADLINE_S):
                while not any(line["event"] == "malformed message dropped" for line in logs):
                    worker.send(worker_hello("worker-1"))
                    await worker.receive()
        raw.close(linger=0)


async def test_a_message_in_anothers_name_is_dropped() -> None:
    async with serving() as stage:
        liar, worker = stage.worker("worker-liar"), stage.worker("worker-1")
        with capture_logs() as logs:
            liar.send(worker_hello("worker-1"))
            liar.send(worker_hello("worker-liar"))
            assert isinstance(await liar.receive(), m.Welcome)
        (line,) = [line for line in logs if line["event"] == "message in another's name dropped"]
        assert (line["sender"], line["claimed"]) == ("worker-liar", "worker-1")
        # Nobody registered worker-1, so its heartbeat is a stranger's.
        worker.send(m.WorkerHeartbeat("worker-1", "", 0, True))
        assert isinstance(await worker.receive(), m.Welcome)


async def test_an_unusable_address_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="can't listen"):
        await serve_scheduler(SchedulerConfig(bind="tcp://256.0.0.1:1"))


async def test_an_unknown_policy_is_a_config_error_that_names_the_known() -> None:
    with pytest.raises(ConfigError, match="fifo"):
        await serve_scheduler(SchedulerConfig(bind="tcp://127.0.0.1:*", policy="lifo"))


class Unreachable:
    """A link on which nobody is there."""

    def send(self, message: m.Message, *, to: str = "") -> transport.SendOutcome:
        return transport.SendOutcome.UNREACHABLE


async def test_a_send_that_fails_is_counted() -> None:
    shell = SchedulerShell(SchedulerCore("boot"), Unreachable())  # type: ignore[arg-type]
    shell.handle(worker_hello("worker-1"))
    assert shell.counts["send_unreachable"] == 2


async def test_an_event_that_the_core_cannot_digest_is_logged_and_survived() -> None:
    core = SchedulerCore("boot")
    shell = SchedulerShell(core, Unreachable())  # type: ignore[arg-type]
    shell.handle(gateway_hello())
    shell.handle(worker_hello("worker-1"))
    shell.handle(submit(request("r1", prompt="a secret")))
    core.book.live["r1"].status = "waiting"  # a record that contradicts the rest
    with capture_logs() as logs:
        shell.handle(m.WorkerDraining("worker-1", "boot", leaving=True))
    (line,) = [line for line in logs if line["log_level"] == "error"]
    assert (line["event_type"], line["worker_id"]) == ("WorkerDraining", "worker-1")
    assert "secret" not in str(line)
    assert shell.counts["core_error"] == 1
