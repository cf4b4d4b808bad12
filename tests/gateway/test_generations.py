"""POST /v1/images/generations from call to pictures, with a scripted scheduler and worker."""

import base64

from common import messages as m
from tests.builders import MODEL, WORKER
from tests.gateway.conftest import WorkerFactory
from tests.gateway.stack import RunningGateway, ScriptedScheduler, picture_of, running_gateway

TIMINGS = m.StageTimings(encode_s=0.1, denoise_s=2.0, decode_s=0.3, image_s=0.01)


def pictures(reply: dict) -> list[bytes]:
    return [base64.b64decode(entry["b64_json"], validate=True) for entry in reply["data"]]


async def test_three_pictures_come_back_in_order_with_their_seeds(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = gateway.post({"prompt": "red apple", "n": 3, "seed": 7})
    requests = await scheduler.accept()
    worker = connect_worker(requests[0])
    for request in (requests[2], requests[0], requests[1]):
        worker.deliver(request)
    status, reply, _ = await call
    assert status == 200
    assert [entry["seed"] for entry in reply["data"]] == [7, 8, 9]
    assert pictures(reply) == [picture_of(request) for request in requests]
    assert [request.params.seed for request in requests] == [7, 8, 9]


async def test_every_picture_is_acknowledged_as_known(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = gateway.post({"prompt": "red apple"})
    (request,) = await scheduler.accept()
    worker = connect_worker(request)
    worker.deliver(request)
    assert await worker.ack(request) == m.ImageAck(request_id=request.request_id, attempt=1, known=True)
    assert (await call)[0] == 200


async def test_reply_has_openais_fields_and_ours(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = gateway.post({"prompt": "red apple", "size": "96x64", "output_format": "webp", "seed": 5})
    (request,) = await scheduler.accept()
    scheduler.update(request.request_id, "preparing", attempt=1, worker_id=WORKER)
    connect_worker(request).deliver(request, timings=TIMINGS, warnings=("the prompt was cut",))
    _, reply, headers = await call
    assert reply["model"] == MODEL
    assert reply["size"] == "96x64"
    assert reply["output_format"] == "webp"
    assert reply["background"] == "opaque"
    assert reply["seed"] == 5
    assert reply["warnings"] == ["the prompt was cut"]
    assert reply["request_id"] == headers["x-request-id"]
    assert reply["usage"]["output_tokens"] == 12 * 8
    assert reply["data"][0]["timings"] == reply["timings"]
    assert reply["timings"].keys() == {"queue_s", "encode_s", "denoise_s", "decode_s", "image_s", "total_s"}
    assert reply["timings"]["denoise_s"] == 2.0
    assert 0 <= reply["timings"]["queue_s"] <= reply["timings"]["total_s"]


async def test_absent_fields_become_the_models_defaults(gateway: RunningGateway, scheduler: ScriptedScheduler) -> None:
    call = gateway.post({"prompt": "red apple", "size": "auto", "seed": None, "negative_prompt": None})
    (request,) = await scheduler.accept()
    call.cancel()
    params = request.params
    assert (params.width, params.height) == (64, 64)
    assert (params.num_inference_steps, params.guidance_scale) == (20, 4.0)
    assert params.true_cfg_scale is None
    assert 0 <= params.seed < 2**32
    assert request.output.output_format == "png"


async def test_explicit_values_reach_the_request(gateway: RunningGateway, scheduler: ScriptedScheduler) -> None:
    body = {
        "prompt": "rød æble 🍎",
        "model": MODEL,
        "negative_prompt": "blurry",
        "size": "128x64",
        "num_inference_steps": 12.0,
        "guidance_scale": 3,
        "seed": 2**63 - 1,
        "output_format": "jpeg",
        "output_compression": 80,
    }
    call = gateway.post(body)
    (request,) = await scheduler.accept()
    call.cancel()
    params = request.params
    assert (params.prompt, params.negative_prompt) == ("rød æble 🍎", "blurry")
    assert (params.width, params.height) == (128, 64)
    assert params.num_inference_steps == 12
    assert isinstance(params.num_inference_steps, int)
    assert params.guidance_scale == 3.0
    assert params.seed == 2**63 - 1
    assert (request.output.output_format, request.output.output_compression) == ("jpeg", 80)


async def test_two_calls_without_a_seed_draw_different_ones(
    gateway: RunningGateway, scheduler: ScriptedScheduler
) -> None:
    calls = [gateway.post({"prompt": "red apple"}) for _ in range(2)]
    seeds = {(await scheduler.accept())[0].params.seed for _ in calls}
    for call in calls:
        call.cancel()
    assert len(seeds) == 2


async def test_requests_name_the_gateways_data_home(gateway: RunningGateway, scheduler: ScriptedScheduler) -> None:
    call = gateway.post({"prompt": "red apple"})
    (request,) = await scheduler.accept()
    call.cancel()
    assert request.home.gateway_id == scheduler.gateway_id
    assert request.home.address.startswith("tcp://127.0.0.1:")


async def test_large_pictures_come_back_whole(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    payload = bytes(range(256)) * 12_345  # above the size that is encoded in a thread, and no multiple of a piece
    call = gateway.post({"prompt": "red apple"})
    (request,) = await scheduler.accept()
    connect_worker(request).deliver(request, payload)
    status, reply, _ = await call
    assert status == 200
    assert pictures(reply) == [payload]


async def test_a_completed_update_before_the_picture_ends_nothing(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = gateway.post({"prompt": "red apple"})
    (request,) = await scheduler.accept()
    scheduler.update(request.request_id, "finished_completed", attempt=1, worker_id=WORKER)
    connect_worker(request).deliver(request)
    assert (await call)[0] == 200


async def test_a_completed_update_after_the_picture_changes_nothing(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = gateway.post({"prompt": "red apple", "n": 2})
    first, second = await scheduler.accept()
    worker = connect_worker(first)
    worker.deliver(first)
    await worker.ack(first)
    scheduler.update(first.request_id, "finished_completed", attempt=1, worker_id=WORKER)
    worker.deliver(second)
    status, reply, _ = await call
    assert status == 200
    assert pictures(reply) == [picture_of(first), picture_of(second)]


async def test_a_picture_without_any_update_is_enough(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = gateway.post({"prompt": "red apple"})
    (request,) = (await scheduler.expect(m.SubmitRequests)).requests
    connect_worker(request).deliver(request, timings=TIMINGS)
    status, reply, _ = await call
    assert status == 200
    assert reply["timings"]["queue_s"] == 0.0


async def test_the_gateways_warnings_come_before_the_workers(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = gateway.post({"prompt": "red apple", "negative_prompt": "blurry", "guidance_scale": 1, "n": 2})
    requests = await scheduler.accept()
    worker = connect_worker(requests[0])
    for request in requests:
        worker.deliver(request, warnings=("the prompt was cut",))
    _, reply, _ = await call
    assert reply["warnings"] == [
        "negative_prompt has no effect because guidance is off (guidance_scale <= 1)",
        "the prompt was cut",
    ]


async def test_advertised_address_goes_into_the_data_home(scheduler: ScriptedScheduler) -> None:
    async with running_gateway(scheduler.address, advertise="tcp://gateway.example:5571") as gateway:
        await gateway.ready()
        call = gateway.post({"prompt": "red apple"})
        (request,) = await scheduler.accept()
        call.cancel()
    assert request.home.address == "tcp://gateway.example:5571"
