"""The official openai client, unmodified, against the real gateway."""

import asyncio
import base64
from collections.abc import AsyncIterator

import openai
import pytest

from common.errors import ErrorCode, ErrorInfo
from tests.builders import MODEL
from tests.gateway.conftest import WorkerFactory
from tests.gateway.stack import DEADLINE_S, RunningGateway, ScriptedScheduler, picture_of


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    # Strict: a reply that does not fit the client's own models raises.
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=DEADLINE_S,
        _strict_response_validation=True,
    ) as client:
        yield client


async def test_pictures_seed_and_timings_reach_the_caller(
    client: openai.AsyncOpenAI, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = asyncio.create_task(
        client.images.generate(
            model=MODEL,
            prompt="red apple",
            size="64x64",
            n=2,
            quality="high",
            output_format="png",
            extra_body={"num_inference_steps": 4, "guidance_scale": 3.5, "seed": 11, "negative_prompt": "blurry"},
        )
    )
    requests = await scheduler.accept()
    worker = connect_worker(requests[0])
    for request in requests:
        worker.deliver(request)
    reply = await call
    assert [base64.b64decode(image.b64_json or "") for image in reply.data or []] == [
        picture_of(request) for request in requests
    ]
    assert requests[0].params.num_inference_steps == 4
    assert (reply.size, reply.background, reply.output_format, reply.quality) == ("64x64", "opaque", "png", "high")
    assert reply.usage is not None
    assert reply.usage.total_tokens == 2 * 64
    assert reply.model_extra is not None
    assert reply.model_extra["seed"] == 11
    assert reply.model_extra["timings"]["total_s"] > 0
    assert reply._request_id == reply.model_extra["request_id"]
    assert reply.data is not None
    assert [image.model_extra["seed"] for image in reply.data if image.model_extra] == [11, 12]


async def test_models_can_be_listed_and_retrieved(client: openai.AsyncOpenAI) -> None:
    listed = [model.id async for model in client.models.list()]
    assert listed == [MODEL]
    assert (await client.models.retrieve(MODEL)).owned_by == "stepweave"


async def test_bad_request_is_the_clients_typed_exception(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await client.images.generate(model=MODEL, prompt="red apple", size="65x64")
    assert raised.value.param == "size"
    assert "'64x64'" in raised.value.message
    assert raised.value.request_id is not None


async def test_unknown_model_is_the_clients_typed_exception(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        await client.images.generate(model="nope", prompt="red apple")
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("code", "exception"),
    [
        ("queue_full", openai.RateLimitError),
        ("generation_failed", openai.InternalServerError),
        ("no_worker", openai.InternalServerError),
        ("content_policy_violation", openai.BadRequestError),
    ],
)
async def test_failures_are_the_clients_typed_exceptions(
    client: openai.AsyncOpenAI, scheduler: ScriptedScheduler, code: ErrorCode, exception: type[openai.APIStatusError]
) -> None:
    call = asyncio.create_task(client.images.generate(model=MODEL, prompt="red apple"))
    (request,) = await scheduler.accept()
    scheduler.update(request.request_id, "finished_error", error=ErrorInfo(code, "it went wrong"))
    with pytest.raises(exception) as raised:
        await call
    assert raised.value.code == code


async def test_client_with_retries_asks_once_where_a_retry_cannot_help(
    client: openai.AsyncOpenAI, scheduler: ScriptedScheduler
) -> None:
    call = asyncio.create_task(client.with_options(max_retries=2).images.generate(model=MODEL, prompt="red apple"))
    (request,) = await scheduler.accept()
    scheduler.update(request.request_id, "finished_error", error=ErrorInfo("generation_failed", "it went wrong"))
    with pytest.raises(openai.InternalServerError):
        await call


async def test_client_with_retries_comes_back_after_a_full_queue(
    client: openai.AsyncOpenAI, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = asyncio.create_task(client.with_options(max_retries=1).images.generate(model=MODEL, prompt="red apple"))
    (request,) = await scheduler.accept()
    full = ErrorInfo("queue_full", "full")
    scheduler.update(request.request_id, "finished_error", error=full, retry_after_s=0.01)
    (again,) = await scheduler.accept()
    connect_worker(again).deliver(again)
    assert (await call).data is not None
