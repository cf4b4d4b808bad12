"""What a gateway tells Prometheus: real HTTP and real sockets, a scripted scheduler and worker."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import zmq.asyncio
from structlog.testing import capture_logs

from common import messages as m
from common.errors import ErrorInfo
from services.gateway.pending import PendingCalls
from tests.builders import MODEL
from tests.common.scraping import DEADLINE_S, Scraped, scrape
from tests.common.test_metrics import free_port
from tests.gateway.stack import RunningGateway, ScriptedScheduler, ScriptedWorker, running_gateway

BODY = {"prompt": "red apple", "size": "64x64", "seed": 7}
# So short that the call takes longer for certain.
TIMINGS = m.StageTimings(encode_s=1e-5, denoise_s=2e-5, decode_s=1e-5, image_s=1e-5)
GENERATIONS = "/v1/images/generations"


class Stage:
    """A gateway that is ready, its metrics' port, and its peers."""

    def __init__(self, context: zmq.asyncio.Context, scheduler: ScriptedScheduler, gateway: RunningGateway, port: int):
        self.context, self.scheduler, self.gateway, self.port = context, scheduler, gateway, port

    async def scrape(self) -> Scraped:
        return await asyncio.to_thread(scrape, self.port)

    async def scrape_until(self, condition: Callable[[Scraped], bool]) -> Scraped:
        async with asyncio.timeout(DEADLINE_S):
            while not condition(scraped := await self.scrape()):
                pass
        return scraped


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    context, port = zmq.asyncio.Context(), free_port()
    scheduler = ScriptedScheduler(context)
    async with running_gateway(scheduler.address, metrics_port=port) as gateway:
        await gateway.ready()
        yield Stage(context, scheduler, gateway, port)
    await scheduler.close()
    context.destroy(linger=0)


async def test_pictures_outcomes_and_replies_are_counted(stage: Stage) -> None:
    before = (await stage.scrape()).counted()
    call = stage.gateway.post(BODY | {"n": 2})
    requests = await stage.scheduler.accept()
    assert (await stage.scrape()).total("stepweave_gateway_pending_requests", model=MODEL) == 2
    worker = ScriptedWorker(stage.context, requests[0].home.address)
    with capture_logs() as lines:
        for each in requests:
            worker.deliver(each, timings=TIMINGS)
            worker.deliver(each, timings=TIMINGS)  # its acknowledgement was lost
        status, reply, _ = await call
    assert status == 200
    (line,) = [line for line in lines if line["event"] == "call"]
    assert (line["request_id"], line["worker_ids"]) == (reply["request_id"], [worker.worker_id])
    failing = stage.gateway.post(BODY)
    (failed,) = await stage.scheduler.accept()
    stage.scheduler.update(failed.request_id, "finished_error", error=ErrorInfo("queue_full", "the queue is full"))
    assert (await failing)[0] == 429
    assert (await stage.gateway.post(BODY | {"size": "1x1"}))[0] == 400
    assert (await stage.gateway.call("GET", f"/v1/models/{MODEL}"))[0] == 200

    scraped = await stage.scrape_until(lambda found: found.total("stepweave_gateway_late_outcomes_total") == 2)
    assert scraped.total("stepweave_gateway_requests_total", model=MODEL, outcome="completed") == 2
    assert scraped.total("stepweave_gateway_requests_total", model=MODEL, outcome="error") == 1
    assert scraped.total("stepweave_gateway_request_seconds_count", model=MODEL) == 2
    assert scraped.total("stepweave_gateway_queue_seconds_count", model=MODEL) == 2
    waited = scraped.total("stepweave_gateway_request_seconds_sum") - scraped.total(
        "stepweave_gateway_queue_seconds_sum"
    )
    assert waited == pytest.approx(2 * 5e-5)
    assert scraped.total("stepweave_gateway_pending_requests", model=MODEL) == 0
    assert scraped.total("stepweave_gateway_scheduler_heard") == 1
    replies = "stepweave_gateway_replies_total"
    assert scraped.total(replies, route=GENERATIONS, status="200", code="") == 1
    assert scraped.total(replies, route=GENERATIONS, status="429", code="queue_full") == 1
    assert scraped.total(replies, route=GENERATIONS, status="400") == 1
    assert scraped.total(replies, route="/v1/models/{model}", status="200") == 1
    # Probes were answered 503 before there was a model, maybe.
    assert {each for each in scraped.counted() if "/health/ready" not in str(each)} <= before, "a rate misses the first"
    await worker.close()


@pytest.mark.parametrize(
    ("method", "path", "body", "route", "status", "code"),
    [
        ("GET", "/made-up", b"", "none", 404, "unknown_url"),
        ("GET", "/v1/requests/made-up", b"", "/v1/requests/{id}", 404, "request_not_found"),
        ("GET", GENERATIONS, b"", GENERATIONS, 405, "method_not_allowed"),
        ("DELETE", "/v1/models/made-up", b"", "/v1/models/{model}", 405, "method_not_allowed"),
        ("POST", GENERATIONS, b"{", GENERATIONS, 400, "invalid_request_error"),
        ("POST", GENERATIONS, b'{"prompts": 1}', GENERATIONS, 400, "unknown_parameter"),
        ("POST", GENERATIONS, b" " * 2**21, GENERATIONS, 413, "body_too_large"),
        ("POST", GENERATIONS, b'{"prompt": "red apple"}', GENERATIONS, 500, "internal"),
    ],
)
async def test_every_error_has_its_code_in_metrics_and_log(
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
    body: bytes,
    route: str,
    status: int,
    code: str,
) -> None:
    monkeypatch.setattr(PendingCalls, "open", lambda *_: 1 / 0)  # a fault of ours, for the call that gets so far
    with capture_logs() as lines:
        assert (await stage.gateway.call(method, path, data=body))[0] == status
    (line,) = [line for line in lines if line["event"] == "call"]
    assert (line["status"], line["error"]) == (status, code)
    scraped = await stage.scrape()
    replies = "stepweave_gateway_replies_total"
    assert scraped.total(replies, route=route, status=str(status), code=code) == 1
    assert not any("made-up" in label["route"] for label in scraped.labels(replies))


async def test_a_client_that_went_away_is_an_abort(stage: Stage) -> None:
    call = stage.gateway.post(BODY)
    await stage.scheduler.accept()
    call.cancel()
    await stage.scheduler.expect(m.AbortRequest)
    await stage.scrape_until(
        lambda found: found.total("stepweave_gateway_replies_total", route=GENERATIONS, status="499") == 1
    )
    scraped = await stage.scrape()
    assert scraped.total("stepweave_gateway_requests_total", outcome="aborted") == 1


async def test_what_is_no_message_is_counted_by_link(stage: Stage) -> None:
    call = stage.gateway.post(BODY)
    (request,) = await stage.scheduler.accept()
    noise = stage.context.socket(zmq.DEALER)
    noise.setsockopt(zmq.LINGER, 0)
    noise.connect(request.home.address)
    await noise.send_multipart([b"noise"])
    worker = ScriptedWorker(stage.context, request.home.address)
    worker.deliver(request, nbytes=10_000)  # of which not all have come
    scraped = await stage.scrape_until(
        lambda found: (
            found.total("stepweave_gateway_truncated_images_total") == 1
            and found.total("stepweave_gateway_malformed_frames_total", link="data") == 1
        )
    )
    assert scraped.total("stepweave_gateway_malformed_frames_total", link="control") == 0
    worker.deliver(request)
    assert (await call)[0] == 200
    await worker.close()
    noise.close(linger=0)
