"""The services started singly, over TCP: workers that die, and a pipeline that fails on one request."""

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import diffusers
import pytest

from services.demo import DEMO_CHECKPOINT
from tests.stack import references
from tests.stack.processes import DEADLINE_S, Stack, free_port, running, stepweave, wait_until

LOGS = ["--log-level", "debug", "--log-format", "json"]


class Fleet:
    """A scheduler and a gateway, and workers that a test starts."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self._run("scheduler", stepweave("scheduler", "--bind", self.address, "--lost-after", "1.5", *LOGS))
        port = free_port()
        gateway = ["gateway", "--scheduler", self.address, "--data-bind", "tcp://127.0.0.1:*", "--port", str(port)]
        self.gateway = Stack(self._run("gateway", stepweave(*gateway, *LOGS)), port, folder / "gateway.log")
        self.workers: dict[str, Any] = {}

    def start_worker(self, name: str, program: list[str] | None = None) -> None:
        command = program or stepweave("worker")
        flags = ["--scheduler", self.address, "--name", name, "--threads", "1", *LOGS]
        self.workers[name] = self._run(name, [*command, *flags])

    def wait_for_workers(self) -> None:
        wait_until(lambda: self._live_workers() == len(self.workers), "the workers are there")

    def _live_workers(self) -> int:
        status, body = self.gateway.get("/v1/models")
        return sum(model["workers"] for model in body["data"]) if status == 200 else 0

    def steps_of(self, name: str) -> int:
        log = Stack(self.workers[name], 0, self._folder / f"{name}.log")
        return sum(line["event"] == "step" for line in log.log_lines())

    def _run(self, name: str, command: list[str]) -> Any:
        return self._stack.enter_context(running(command, self._folder / f"{name}.log"))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        yield Fleet(tmp_path, stack)


@pytest.fixture(scope="module")
def pipeline() -> diffusers.DiffusionPipeline:
    return references.load_demo()


def body(index: int, **changes: Any) -> dict[str, Any]:
    asked = {"prompt": "red apple", "size": "64x64", "num_inference_steps": 20, "guidance_scale": 4.0, "seed": index}
    return asked | {"max_sequence_length": 20} | changes


async def post_all(fleet: Fleet, bodies: list[dict[str, Any]]) -> list[tuple[int, Any]]:
    async def post(session: aiohttp.ClientSession, asked: dict[str, Any]) -> tuple[int, Any]:
        async with session.post("/v1/images/generations", json=asked) as response:
            return response.status, await response.json()

    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(fleet.gateway.url, timeout=timeout) as session:
        return list(await asyncio.gather(*(post(session, asked) for asked in bodies)))


def assert_is_solo(pipeline: diffusers.DiffusionPipeline, asked: dict[str, Any], reply: tuple[int, Any]) -> None:
    status, answer = reply
    assert status == 200, answer
    picture = references.decoded(answer["data"][0]["b64_json"])
    assert references.largest_difference(picture, references.solo(pipeline, asked)) <= 1


async def test_the_work_of_a_killed_worker_is_done_by_another(
    fleet: Fleet, pipeline: diffusers.DiffusionPipeline
) -> None:
    fleet.start_worker("one")
    fleet.start_worker("two")
    await asyncio.to_thread(fleet.wait_for_workers)
    asked = [body(index, num_inference_steps=40) for index in range(8)]
    replies = asyncio.ensure_future(post_all(fleet, asked))
    await asyncio.to_thread(wait_until, lambda: min(map(fleet.steps_of, fleet.workers)) > 3, "both are at work")
    fleet.workers["one"].kill()
    for each, reply in zip(asked, await replies, strict=True):
        assert_is_solo(pipeline, each, reply)


METHODS = ["prepare_encode", "denoise_step", "step_scheduler", "post_decode"]


async def test_a_request_on_which_the_pipeline_fails_ends_alone(
    fleet: Fleet, pipeline: diffusers.DiffusionPipeline
) -> None:
    fleet.start_worker("faulty", [sys.executable, "-m", "tests.stack.faulty_worker"])
    await asyncio.to_thread(fleet.wait_for_workers)
    good = [body(index) for index in range(4)]
    bad = [body(10 + index, prompt=f"fail {method}") for index, method in enumerate(METHODS)]
    nan = [body(20, prompt="nan denoise_step"), body(21, prompt="nan post_decode")]
    replies = await post_all(fleet, good + bad + nan)
    for each, reply in zip(good, replies, strict=False):
        assert_is_solo(pipeline, each, reply)
    for status, answer in replies[len(good) : len(good) + len(bad)]:
        assert status == 500
        assert answer["error"]["code"] == "generation_failed"
        assert "Traceback" not in answer["error"]["message"]
    for status, answer in replies[-len(nan) :]:
        assert status == 500
        assert answer["error"]["code"] == "non_finite"
    assert_is_solo(pipeline, body(30), (await post_all(fleet, [body(30)]))[0])


def test_the_demo_checkpoint_is_package_data() -> None:
    assert (DEMO_CHECKPOINT / "model_index.json").is_file()
