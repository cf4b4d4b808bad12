"""The services started singly, over TCP: workers that die, and a pipeline that fails on one request."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest

from services.demo import DEMO_CHECKPOINT
from tests.stack import references
from tests.stack.fleet import Fleet, post_all
from tests.stack.processes import wait_until


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


async def test_the_work_of_a_killed_worker_is_done_by_another(
    fleet: Fleet, pipeline: diffusers.DiffusionPipeline
) -> None:
    fleet.start_worker("one")
    fleet.start_worker("two")
    await asyncio.to_thread(fleet.wait_for_workers)
    asked = [body(index, num_inference_steps=40) for index in range(8)]
    replies = asyncio.ensure_future(post_all(fleet, asked))
    await asyncio.to_thread(
        wait_until, lambda: all(len(fleet.steps_of(name)) > 3 for name in fleet.workers), "both are at work"
    )
    fleet.workers["one"].kill()
    for each, reply in zip(asked, await replies, strict=True):
        references.assert_is_solo(pipeline, each, reply)


@pytest.mark.parametrize("method", ["load", "prepare_encode", "denoise_step"])
def test_a_worker_in_the_midst_of_something_long_ends_in_time_and_without_a_crash(fleet: Fleet, method: str) -> None:
    """Its thread can't be interrupted, and must not be taken away by the interpreter's end either."""
    fleet.start_worker("slow", program=[sys.executable, "-m", "tests.stack.slow_worker", method])
    wait_until(lambda: f"{method} takes its time" in fleet.log_of("slow"), "it is at it")
    worker = fleet.workers["slow"]
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=5) == 0, fleet.log_of("slow")


METHODS = ["encode_prompts", "prepare_encode", "denoise_step", "step_scheduler", "post_decode"]


async def test_a_request_on_which_the_pipeline_fails_ends_alone(
    fleet: Fleet, pipeline: diffusers.DiffusionPipeline
) -> None:
    fleet.start_worker("faulty", program=[sys.executable, "-m", "tests.stack.faulty_worker"])
    await asyncio.to_thread(fleet.wait_for_workers)
    good = [body(index) for index in range(4)]
    bad = [body(10 + index, prompt=f"fail {method}") for index, method in enumerate(METHODS)]
    nan = [body(20, prompt="nan denoise_step"), body(21, prompt="nan post_decode")]
    replies = await post_all(fleet, good + bad + nan)
    for each, reply in zip(good, replies, strict=False):
        references.assert_is_solo(pipeline, each, reply)
    for status, answer in replies[len(good) : len(good) + len(bad)]:
        assert status == 500
        assert answer["error"]["code"] == "generation_failed"
        assert "Traceback" not in answer["error"]["message"]
    for status, answer in replies[-len(nan) :]:
        assert status == 500
        assert answer["error"]["code"] == "non_finite"
    references.assert_is_solo(pipeline, body(30), (await post_all(fleet, [body(30)]))[0])


def test_the_demo_checkpoint_is_package_data() -> None:
    assert (DEMO_CHECKPOINT / "model_index.json").is_file()
