"""Several gateways on one scheduler, one of which dies; and more calls than the queue may hold."""

import asyncio
import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import diffusers
import openai
import pytest

from tests.stack import references
from tests.stack.fleet import Fleet, post_all
from tests.stack.processes import Stack, wait_until

MAX_QUEUE = 4


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[tuple[Path, contextlib.ExitStack]]:
    with contextlib.ExitStack() as stack:
        yield tmp_path, stack


@pytest.fixture(scope="module")
def pipeline() -> diffusers.DiffusionPipeline:
    return references.load_demo()


def bodies(count: int, first_seed: int, **changes: Any) -> list[dict[str, Any]]:
    common = {"prompt": "red apple", "size": "64x64", "num_inference_steps": 20, "guidance_scale": 4.0}
    return [common | {"max_sequence_length": 20, "seed": first_seed + index} | changes for index in range(count)]


async def test_a_gateway_that_dies_takes_its_own_requests_along_and_no_others(
    folder: tuple[Path, contextlib.ExitStack], pipeline: diffusers.DiffusionPipeline
) -> None:
    fleet = Fleet(*folder)
    other = fleet.start_gateway("other")
    fleet.start_worker("worker")
    await asyncio.to_thread(fleet.wait_for_workers)
    await asyncio.to_thread(wait_until, lambda: other.get("/health/ready")[0] == 200, "the other gateway is ready")
    # So long that they end early if at all.
    doomed = asyncio.ensure_future(post_all(fleet, bodies(4, 0, num_inference_steps=200), other))
    asked = bodies(4, 50, num_inference_steps=40)
    posted = asyncio.ensure_future(post_all(fleet, asked))

    def admitted() -> set[str]:
        return {line["request_id"] for line in fleet.lines_of("worker") if line["event"] == "admitted"}

    def aborted() -> set[str]:
        lines = [line for line in fleet.lines_of("worker") if line["event"] == "released"]
        return {line["request_id"] for line in lines if line["reason"] == "aborted"}

    await asyncio.to_thread(wait_until, lambda: len(admitted()) == 8, "all are at work")
    fleet.kill("other")
    with pytest.raises(aiohttp.ClientError):
        await doomed
    for each, reply in zip(asked, await posted, strict=True):
        references.assert_is_solo(pipeline, each, reply)
    await asyncio.to_thread(wait_until, lambda: len(aborted()) == 4, "what nobody waits for any more is let go of")
    completed = {line["request_id"] for line in fleet.lines_of("worker") if line["event"] == "completed"}
    assert completed == admitted() - aborted()
    again = fleet.start_gateway("other")
    await asyncio.to_thread(wait_until, lambda: again.get("/health/ready")[0] == 200, "it is started again")
    more = bodies(2, 90)
    for each, reply in zip(more, await post_all(fleet, more, again), strict=True):
        references.assert_is_solo(pipeline, each, reply)


async def test_over_the_bound_calls_are_refused_and_those_accepted_are_drawn(
    folder: tuple[Path, contextlib.ExitStack], pipeline: diffusers.DiffusionPipeline
) -> None:
    fleet = Fleet(*folder, "--max-queue", str(MAX_QUEUE))
    fleet.start_worker("worker", "--max-num-seqs", "2", "--max-residents", "2")
    await asyncio.to_thread(fleet.wait_for_workers)
    asked = bodies(20, 0)
    replies = await post_all(fleet, asked)
    accepted = [(each, reply) for each, reply in zip(asked, replies, strict=True) if reply[0] == 200]
    refused = [answer["error"] for status, answer in replies if status == 429]
    assert len(accepted) + len(refused) == len(asked)
    assert len(accepted) >= MAX_QUEUE
    assert refused
    for error in refused:
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    for each, reply in accepted:
        references.assert_is_solo(pipeline, each, reply)


async def test_a_refusal_tells_the_official_client_to_come_back(folder: tuple[Path, contextlib.ExitStack]) -> None:
    fleet = Fleet(*folder, "--max-queue", "1")
    fleet.start_worker("worker", "--max-num-seqs", "1", "--max-residents", "1")
    await asyncio.to_thread(fleet.wait_for_workers)
    async with fleet.gateway.client() as client:
        calls = []
        for name, status in (("runs", "running"), ("waits", "waiting")):
            headers = {"X-Client-Request-Id": name}
            long = {"num_inference_steps": 200}
            calls.append(
                asyncio.ensure_future(
                    client.images.generate(prompt="red apple", extra_body=long, extra_headers=headers)
                )
            )
            await asyncio.to_thread(wait_until, partial(_is, fleet.gateway, name, status), f"the call {name}")
        with pytest.raises(openai.RateLimitError) as refused:
            await client.images.generate(prompt="red apple")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert refused.value.response.headers["x-should-retry"] == "true"
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def _is(gateway: Stack, name: str, status: str) -> bool:
    code, body = gateway.get(f"/v1/requests/{name}")
    return code == 200 and body["data"][0]["status"] == status
