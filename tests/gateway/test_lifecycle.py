"""Readiness, progress queries, models, the end of the process, and what it must not import."""

import asyncio
import subprocess
import sys

import pytest

from common import messages as m
from common.config import GatewayConfig
from common.errors import ConfigError
from services.gateway.app import serve_gateway
from tests.builders import MODEL, WORKER, profile
from tests.gateway.conftest import WorkerFactory
from tests.gateway.stack import DEADLINE_S, FAST, RunningGateway, ScriptedScheduler, running_gateway


async def ready_reply(gateway: RunningGateway, status: int, reason: str | None) -> None:
    """Waits until /health/ready says so."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            got, reply, _ = await gateway.call("GET", "/health/ready")
            if (got, reply.get("reason")) == (status, reason):
                return
            await asyncio.sleep(0.005)


async def test_ready_follows_the_scheduler_and_its_models(scheduler: ScriptedScheduler) -> None:
    scheduler.silent = True
    async with running_gateway(scheduler.address, FAST) as gateway:
        assert (await gateway.call("GET", "/health/live"))[0] == 200
        await ready_reply(gateway, 503, "the scheduler is not heard")
        scheduler.models = ()
        scheduler.silent = False
        await ready_reply(gateway, 503, "no model has a worker")
        scheduler.models = (m.ModelStatus(profile=profile(), workers=0),)
        scheduler.tell_models()
        await ready_reply(gateway, 503, "no model has a worker")
        scheduler.models = (m.ModelStatus(profile=profile(), workers=2),)
        scheduler.tell_models()
        await ready_reply(gateway, 200, None)
        assert (await gateway.call("GET", "/health/ready"))[1]["models"] == [MODEL]
        scheduler.silent = True
        await ready_reply(gateway, 503, "the scheduler is not heard")
        scheduler.silent = False
        await ready_reply(gateway, 200, None)


async def test_a_quiet_but_living_scheduler_keeps_the_gateway_ready(scheduler: ScriptedScheduler) -> None:
    async with running_gateway(scheduler.address, FAST) as gateway:
        await gateway.ready()
        scheduler.inbox.clear()
        for _ in range(4):  # asked by hellos, which it answers; each is due before the scheduler counts as gone
            await scheduler.expect(m.GatewayHello)
            assert (await gateway.call("GET", "/health/ready"))[0] == 200


async def test_without_any_model_a_call_is_a_503_to_try_again(scheduler: ScriptedScheduler) -> None:
    scheduler.models = ()
    async with running_gateway(scheduler.address) as gateway:
        status, reply, headers = await gateway.post({"prompt": "red apple"})
        assert (status, reply["error"]["code"]) == (503, "no_worker")
        assert int(headers["Retry-After"]) >= 1
        assert headers["x-should-retry"] == "true"


async def test_without_a_name_the_first_model_by_name_is_taken(
    scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    scheduler.models = tuple(m.ModelStatus(profile=profile(model=name), workers=1) for name in ("b", "a"))
    async with running_gateway(scheduler.address) as gateway:
        await gateway.ready()
        call = gateway.post({"prompt": "red apple"})
        (request,) = await scheduler.accept()
        connect_worker(request).deliver(request)
        assert request.model == "a"
        assert (await call)[1]["model"] == "a"


async def test_models_are_listed_in_openais_shape(gateway: RunningGateway) -> None:
    status, reply, _ = await gateway.call("GET", "/v1/models")
    assert status == 200
    assert reply["object"] == "list"
    (record,) = reply["data"]
    assert (record["id"], record["object"], record["owned_by"]) == (MODEL, "model", "stepweave")
    assert record["default_size"] == "64x64"
    assert (await gateway.call("GET", f"/v1/models/{MODEL}"))[1] == record


async def test_model_names_may_hold_a_slash(scheduler: ScriptedScheduler) -> None:
    scheduler.models = (m.ModelStatus(profile=profile(model="maker/model"), workers=1),)
    async with running_gateway(scheduler.address) as gateway:
        await gateway.ready()
        assert (await gateway.call("GET", "/v1/models/maker/model"))[1]["id"] == "maker/model"


# Progress queries


async def progress_of(gateway: RunningGateway, name: str, status: str) -> dict:
    """Waits until the call's first picture has that status."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            got, reply, _ = await gateway.call("GET", f"/v1/requests/{name}")
            if got == 200 and reply["data"][0]["status"] == status:
                return reply
            await asyncio.sleep(0.005)


async def test_progress_of_a_call_by_either_of_its_names(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = gateway.post({"prompt": "red apple", "n": 2}, headers={"X-Client-Request-Id": "mine"})
    first, second = await scheduler.accept()
    scheduler.update(second.request_id, "waiting", queue_position=3)
    scheduler.update(first.request_id, "running", attempt=1, worker_id=WORKER, step_index=5, total_steps=20)
    reply = await progress_of(gateway, "mine", "running")
    assert reply["status"] == "pending"
    assert reply["client_request_id"] == "mine"
    assert (reply["data"][0]["step_index"], reply["data"][0]["total_steps"]) == (5, 20)
    assert (reply["data"][1]["status"], reply["data"][1]["queue_position"]) == ("waiting", 3)
    assert (await gateway.call("GET", f"/v1/requests/{reply['id']}"))[1] == reply
    worker = connect_worker(first)
    worker.deliver(first)
    worker.deliver(second)
    _, _, headers = await call
    assert headers["x-request-id"] == reply["id"]
    ended = await progress_of(gateway, "mine", "finished_completed")
    assert ended["status"] == "completed"
    assert ended["data"][0]["step_index"] == 20


async def test_progress_of_a_failed_call_names_the_error(gateway: RunningGateway, scheduler: ScriptedScheduler) -> None:
    call = gateway.post({"prompt": "red apple"}, headers={"X-Client-Request-Id": "mine"})
    (request,) = await scheduler.accept()
    scheduler.update(request.request_id, "finished_error")
    await call
    reply = await progress_of(gateway, "mine", "finished_error")
    assert reply["status"] == "failed"
    assert reply["error"]["code"] == "internal"


async def test_progress_of_a_call_that_its_client_left(gateway: RunningGateway, scheduler: ScriptedScheduler) -> None:
    call = gateway.post({"prompt": "red apple"}, headers={"X-Client-Request-Id": "mine"})
    await scheduler.accept()
    call.cancel()
    reply = await progress_of(gateway, "mine", "finished_aborted")
    assert reply["status"] == "aborted"


# The end


async def test_cancellation_ends_pending_calls_with_a_503(scheduler: ScriptedScheduler) -> None:
    async with running_gateway(scheduler.address) as gateway:
        await gateway.ready()
        call = gateway.post({"prompt": "red apple"})
        (request,) = await scheduler.accept()
        await asyncio.wait_for(gateway.stop(), DEADLINE_S)
        status, reply, headers = await call
        assert (status, reply["error"]["code"]) == (503, "shutting_down")
        assert headers["x-should-retry"] == "true"
        assert (await scheduler.expect(m.AbortRequest)).request_ids == (request.request_id,)


async def test_port_in_use_stops_the_start(gateway: RunningGateway, scheduler: ScriptedScheduler) -> None:
    port = int(gateway.url.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1:{port}"):
        await serve_gateway(GatewayConfig(port=port, scheduler=scheduler.address, data_bind="tcp://127.0.0.1:*"))


def test_gateway_imports_neither_torch_nor_a_picture_library() -> None:
    code = (
        "import sys, services.gateway.app\n"
        "print([name for name in ('torch', 'PIL', 'numpy', 'diffusers', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


async def test_a_model_whose_workers_are_gone_is_a_503_and_not_unknown(
    gateway: RunningGateway, scheduler: ScriptedScheduler
) -> None:
    gone = profile(model="gone")
    scheduler.send(
        m.ModelsUpdate(
            scheduler_boot_id=scheduler.boot_id,
            models=(m.ModelStatus(profile=gone, workers=0), m.ModelStatus(profile=profile(), workers=1)),
        )
    )
    async with asyncio.timeout(DEADLINE_S):
        while (reply := await gateway.call("POST", "/v1/images/generations", json={"prompt": "x", "model": "gone"}))[
            0
        ] == 404:
            await asyncio.sleep(0.01)
    status, body, headers = reply
    assert (status, body["error"]["code"]) == (503, "no_worker")
    assert headers["x-should-retry"] == "true"
    listed = (await gateway.call("GET", "/v1/models"))[1]["data"]
    assert [model["id"] for model in listed] == [MODEL]
