"""The links: hellos, beats, what is sent again, and frames that make no sense."""

import asyncio
import contextlib

import pytest
import zmq
import zmq.asyncio

from common import messages as m
from common.config import GatewayConfig
from common.errors import ConfigError, ErrorInfo
from common.params import DiffusionRequest
from services.gateway.app import serve_gateway
from services.gateway.links import LinkTiming
from tests.builders import WORKER, params
from tests.gateway.conftest import WorkerFactory
from tests.gateway.stack import (
    DEADLINE_S,
    FAST,
    RunningGateway,
    ScriptedScheduler,
    ScriptedWorker,
    running_gateway,
    until,
)


async def test_gateway_says_hello_and_answers_a_welcome(scheduler: ScriptedScheduler) -> None:
    async with running_gateway(scheduler.address):
        first = await scheduler.expect(m.GatewayHello)
        assert first.scheduler_boot_id == ""
        assert first.protocol_version == m.PROTOCOL_VERSION
        second = await scheduler.expect(m.GatewayHello)
        assert (second.gateway_id, second.scheduler_boot_id) == (first.gateway_id, "s1")
        assert first.gateway_id.startswith("gateway-")


async def test_heartbeats_name_the_epoch_and_count_what_is_pending(scheduler: ScriptedScheduler) -> None:
    async with running_gateway(scheduler.address, FAST) as gateway:
        await gateway.ready()
        beat = await scheduler.expect(m.GatewayHeartbeat)
        assert (beat.scheduler_boot_id, beat.pending) == ("s1", 0)
        call = gateway.post({"prompt": "red apple", "n": 3})
        await scheduler.accept()
        await scheduler.expect(m.GatewayHeartbeat, lambda beat: beat.pending == 3)
        call.cancel()
        await scheduler.expect(m.AbortRequest)
        scheduler.inbox.clear()
        await scheduler.expect(m.GatewayHeartbeat, lambda beat: beat.pending == 0)


async def test_unanswered_submission_is_sent_again(scheduler: ScriptedScheduler, connect_worker: WorkerFactory) -> None:
    async with running_gateway(scheduler.address, FAST) as gateway:
        await gateway.ready()
        call = gateway.post({"prompt": "red apple", "n": 2})
        first = await scheduler.expect(m.SubmitRequests)
        second = await scheduler.expect(m.SubmitRequests)
        assert second == first
        for request in second.requests:
            scheduler.update(request.request_id, "waiting")
        worker = connect_worker(second.requests[0])
        for request in second.requests:
            worker.deliver(request)
        assert (await call)[0] == 200


async def test_quiet_request_is_submitted_again_with_what_was_heard_of_it(scheduler: ScriptedScheduler) -> None:
    async with running_gateway(scheduler.address, FAST) as gateway:
        await gateway.ready()
        call = gateway.post({"prompt": "red apple"})
        (request,) = await scheduler.accept()
        heard = {"attempt": 2, "worker_id": WORKER, "step_index": 7, "died_on": ("worker-before",)}
        scheduler.update(request.request_id, "running", total_steps=20, **heard)
        again = await scheduler.expect(m.SubmitRequests, lambda submit: bool(submit.claims))
        call.cancel()
        assert again.requests == (request,)
        assert again.claims == (m.RequestClaim(request_id=request.request_id, **heard),)


async def test_only_the_quiet_requests_of_a_call_are_submitted_again(scheduler: ScriptedScheduler) -> None:
    async with running_gateway(scheduler.address, FAST) as gateway:
        await gateway.ready()
        call = gateway.post({"prompt": "red apple", "n": 2})
        loud, quiet = await scheduler.accept()

        async def keep_talking() -> None:
            while True:
                scheduler.update(loud.request_id, "running", attempt=1, worker_id=WORKER)
                await asyncio.sleep(0.02)

        talking = asyncio.create_task(keep_talking())
        # On a machine that stalls for a moment the loud one has been quiet for once, and comes along.
        await scheduler.expect(m.SubmitRequests, lambda again: again.requests == (quiet,))
        talking.cancel()
        call.cancel()


async def test_new_epoch_gets_a_hello_and_all_pending_requests(
    scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    async with running_gateway(scheduler.address) as gateway:
        await gateway.ready()
        call = gateway.post({"prompt": "red apple", "n": 2})
        first, second = await scheduler.accept()
        scheduler.update(first.request_id, "running", attempt=1, worker_id=WORKER, step_index=4, total_steps=20)
        worker = connect_worker(second)
        worker.deliver(second)
        await worker.ack(second)
        scheduler.inbox.clear()
        scheduler.boot_id = "s2"
        scheduler.send(m.Welcome(scheduler_boot_id="s2"))
        assert (await scheduler.expect(m.GatewayHello)).scheduler_boot_id == "s2"
        again = await scheduler.expect(m.SubmitRequests)
        assert again.requests == (first,)
        assert again.claims == (m.RequestClaim(request_id=first.request_id, worker_id=WORKER, attempt=1, step_index=4),)
        worker.deliver(first)
        assert (await call)[0] == 200


async def test_scheduler_that_restarts_at_its_address_is_joined_again(
    zmq_context: zmq.asyncio.Context, connect_worker: WorkerFactory
) -> None:
    scheduler = ScriptedScheduler(zmq_context, boot_id="s1")
    async with running_gateway(scheduler.address, FAST) as gateway:
        await gateway.ready()
        call = gateway.post({"prompt": "red apple"})
        await scheduler.accept()
        await scheduler.close()
        scheduler = await _bind_again(zmq_context, scheduler.address)
        again = await scheduler.expect(m.SubmitRequests)
        scheduler.update(again.requests[0].request_id, "waiting")
        connect_worker(again.requests[0]).deliver(again.requests[0])
        assert (await call)[0] == 200
    await scheduler.close()


async def _bind_again(context: zmq.asyncio.Context, address: str) -> ScriptedScheduler:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(ConfigError):  # the old socket closes in the background
                return ScriptedScheduler(context, address, boot_id="s2")
            await asyncio.sleep(0.01)


async def test_scheduler_that_forgot_the_gateway_hears_everything_again(scheduler: ScriptedScheduler) -> None:
    async with running_gateway(scheduler.address, LinkTiming(heartbeat_s=0.05, silence_s=600.0)) as gateway:
        await gateway.ready()
        call = gateway.post({"prompt": "red apple"})
        (request,) = await scheduler.accept()
        await scheduler.expect(m.GatewayHello, lambda hello: hello.scheduler_boot_id == "s1")
        async with asyncio.timeout(DEADLINE_S):
            while not scheduler.inbox.count(m.SubmitRequests):
                # One that comes right after a hello is taken for the answer to what was sent before it.
                scheduler.send(m.Welcome(scheduler_boot_id="s1"))
                await asyncio.sleep(0.02)
        await scheduler.expect(m.GatewayHello, lambda hello: hello.scheduler_boot_id == "s1")
        assert (await scheduler.expect(m.SubmitRequests)).requests == (request,)
        call.cancel()


async def test_without_a_scheduler_a_call_is_a_503_after_a_bounded_time(scheduler: ScriptedScheduler) -> None:
    async with running_gateway(scheduler.address, FAST) as gateway:
        await gateway.ready()
        scheduler.silent = True
        status, reply, headers = await gateway.post({"prompt": "red apple"})
        assert (status, reply["error"]["code"]) == (503, "scheduler_unavailable")
        assert headers["x-should-retry"] == "true"
        assert int(headers["Retry-After"]) >= 1
        await scheduler.expect(m.AbortRequest)  # in case that it was there after all


async def test_an_accepted_call_outlives_the_accept_deadline_but_not_a_scheduler_that_stays_away(
    scheduler: ScriptedScheduler,
) -> None:
    async with running_gateway(scheduler.address, FAST) as gateway:
        await gateway.ready()
        call = gateway.post({"prompt": "red apple"})
        await scheduler.accept()
        scheduler.silent = True
        status, reply, _ = await call
        assert (status, reply["error"]["code"]) == (503, "scheduler_unavailable")
        assert "went away" in reply["error"]["message"]


async def test_a_request_that_only_waited_is_claimed_too_since_it_was_accepted(scheduler: ScriptedScheduler) -> None:
    async with running_gateway(scheduler.address) as gateway:
        await gateway.ready()
        call = gateway.post({"prompt": "red apple"})
        (request,) = await scheduler.accept()
        scheduler.boot_id = "s2"
        scheduler.send(m.Welcome(scheduler_boot_id="s2"))
        again = await scheduler.expect(m.SubmitRequests)
        assert again.claims == (m.RequestClaim(request_id=request.request_id, worker_id="", attempt=0, step_index=0),)
        call.cancel()


async def test_a_picture_that_is_drawn_a_second_time_is_aborted(
    scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    """Its worker was lost after the picture had left, so the scheduler does not know."""
    async with running_gateway(scheduler.address, FAST) as gateway:
        await gateway.ready()
        call = gateway.post({"prompt": "red apple"})
        (request,) = await scheduler.accept()
        scheduler.update(request.request_id, "waiting", attempt=1)
        connect_worker(request).deliver(request)
        assert (await call)[0] == 200
        scheduler.update(request.request_id, "running", attempt=2, worker_id=WORKER)
        assert (await scheduler.expect(m.AbortRequest)).request_ids == (request.request_id,)


async def test_an_update_of_a_request_that_is_unknown_here_is_answered_by_an_abort(
    scheduler: ScriptedScheduler,
) -> None:
    async with running_gateway(scheduler.address, FAST) as gateway:
        await gateway.ready()
        scheduler.update("forgotten", "decoding", attempt=1, worker_id=WORKER)  # about to end: left alone
        scheduler.update("stray", "preparing", attempt=1, worker_id=WORKER)
        assert (await scheduler.expect(m.AbortRequest)).request_ids == ("stray",)


async def test_a_lost_abort_is_sent_again_when_its_request_still_lives(scheduler: ScriptedScheduler) -> None:
    async with running_gateway(scheduler.address, FAST) as gateway:
        await gateway.ready()
        call = gateway.post({"prompt": "red apple"})
        (request,) = await scheduler.accept()
        call.cancel()
        await scheduler.expect(m.AbortRequest)
        async with asyncio.timeout(DEADLINE_S):
            while not scheduler.inbox.count(m.AbortRequest):
                scheduler.update(request.request_id, "running", attempt=1, worker_id=WORKER)
                await asyncio.sleep(0.02)
        again = await scheduler.expect(m.AbortRequest)
        assert again.request_ids == (request.request_id,)


async def test_refused_gateway_ends_with_a_clear_error(scheduler: ScriptedScheduler) -> None:
    async with running_gateway(scheduler.address) as gateway:
        await gateway.ready()
        scheduler.send(m.Refused("s1", ErrorInfo("protocol_mismatch", "this scheduler speaks protocol 9")))
        with pytest.raises(ConfigError, match="this scheduler speaks protocol 9"):
            await asyncio.wait_for(asyncio.shield(gateway.task), DEADLINE_S)
        gateway.task = asyncio.create_task(asyncio.sleep(0))  # it is over, and its error was seen


# The data link


async def test_duplicate_picture_is_acknowledged_and_dropped(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = gateway.post({"prompt": "red apple", "n": 2})
    first, second = await scheduler.accept()
    worker = connect_worker(first)
    worker.deliver(first)
    worker.deliver(first, b"another picture")
    assert (await worker.ack(first)).known
    assert (await worker.ack(first)).known
    worker.deliver(second)
    status, reply, _ = await call
    assert status == 200
    assert len(reply["data"]) == 2
    worker.deliver(first)
    assert (await worker.ack(first)).known


async def test_picture_of_an_unknown_request_is_acknowledged_as_unknown(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = gateway.post({"prompt": "red apple"})
    (request,) = await scheduler.accept()
    worker = connect_worker(request)
    stranger = DiffusionRequest(request_id="stranger", model="demo", params=params(), home=request.home)
    worker.deliver(stranger, attempt=3)
    assert await worker.ack(stranger) == m.ImageAck(request_id="stranger", attempt=3, known=False)
    call.cancel()


async def test_picture_of_an_aborted_request_is_acknowledged_as_unknown(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = gateway.post({"prompt": "red apple"})
    (request,) = await scheduler.accept()
    call.cancel()
    await scheduler.expect(m.AbortRequest)
    worker = connect_worker(request)
    worker.deliver(request)
    assert not (await worker.ack(request)).known


@pytest.mark.parametrize("fields", [{"nbytes": 5}, {"nbytes": 0}])
async def test_picture_of_another_length_than_it_says_is_no_picture(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory, fields: dict[str, int]
) -> None:
    call = gateway.post({"prompt": "red apple"})
    (request,) = await scheduler.accept()
    worker = connect_worker(request)
    worker.deliver(request, b"truncated", **fields)
    worker.deliver(request, b"whole")
    await worker.ack(request)
    assert (await call)[1]["data"][0]["b64_json"] == "d2hvbGU="
    assert worker.inbox.count(m.ImageAck) == 0


async def test_empty_picture_is_no_picture(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = gateway.post({"prompt": "red apple"})
    (request,) = await scheduler.accept()
    worker = connect_worker(request)
    worker.deliver(request, b"")
    worker.deliver(request, b"whole")
    assert (await call)[1]["data"][0]["b64_json"] == "d2hvbGU="


async def test_fetches_are_answered_as_not_found(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = gateway.post({"prompt": "red apple"})
    (request,) = await scheduler.accept()
    worker = connect_worker(request)
    worker.send(m.FetchInput(request_id=request.request_id, attempt=1, worker_id=WORKER, role="image", index=0))
    assert not (await worker.expect(m.InputData)).found
    worker.send(m.FetchCheckpoint(request_id=request.request_id, attempt=1, worker_id=WORKER))
    assert not (await worker.expect(m.CheckpointData)).found
    call.cancel()


async def test_previews_and_checkpoints_do_no_harm(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = gateway.post({"prompt": "red apple"})
    (request,) = await scheduler.accept()
    worker = connect_worker(request)
    about = {"request_id": request.request_id, "attempt": 1, "worker_id": WORKER, "step_index": 1, "nbytes": 3}
    worker.send(m.PreviewOutput(**about, index=0, output_format="png"), b"abc")
    worker.send(m.Checkpoint(**about, total_steps=20), b"abc")
    worker.deliver(request)
    assert (await call)[0] == 200


GARBAGE = [
    [b""],
    [b"\xc1"],
    [b"\x93" * 100_000],
    [b"\x81\xa4type\xa7Unknown"],
    [b"\x81\xa4type\xabImageOutput"],
    [b"one", b"two", b"three", b"four"],
]


@pytest.mark.parametrize("identity", [b"stranger", b"\xff\xfe"])
@pytest.mark.parametrize("frames", GARBAGE, ids=range(len(GARBAGE)))
async def test_malformed_frames_on_the_data_link_are_dropped(
    gateway: RunningGateway,
    scheduler: ScriptedScheduler,
    zmq_context: zmq.asyncio.Context,
    frames: list[bytes],
    identity: bytes,
    capsys: pytest.CaptureFixture[str],
) -> None:
    call = gateway.post({"prompt": "red apple"})
    (request,) = await scheduler.accept()
    stranger = zmq_context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.ROUTING_ID, identity)
    stranger.connect(request.home.address)
    await stranger.send_multipart(frames)
    await until(lambda: "frame dropped" in capsys.readouterr().out)
    worker = ScriptedWorker(zmq_context, request.home.address)
    worker.deliver(request)
    assert (await call)[0] == 200
    stranger.close(linger=0)
    await worker.close()


async def test_malformed_frames_from_the_scheduler_are_dropped(
    zmq_context: zmq.asyncio.Context,
) -> None:
    router = zmq_context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    async with running_gateway(f"tcp://127.0.0.1:{port}") as gateway:
        peer, _ = await asyncio.wait_for(router.recv_multipart(), DEADLINE_S)
        for frames in GARBAGE:
            await router.send_multipart([peer, *frames])
        await router.send_multipart([peer, b"\x82\xa4type\xacModelsUpdate\xb1scheduler_boot_id\xa2s1"])
        async with asyncio.timeout(DEADLINE_S):
            while (await gateway.call("GET", "/health/ready"))[1]["reason"] != "no model has a worker":
                await asyncio.sleep(0.005)
    router.close(linger=0)


# Addresses


async def test_data_address_in_use_stops_the_start(scheduler: ScriptedScheduler) -> None:
    with pytest.raises(ConfigError, match="can't listen on"):
        await serve_gateway(GatewayConfig(port=0, scheduler=scheduler.address, data_bind=scheduler.address))


async def test_scheduler_address_that_is_none_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="no address to connect to"):
        await serve_gateway(GatewayConfig(port=0, scheduler="nonsense", data_bind="tcp://127.0.0.1:*"))
