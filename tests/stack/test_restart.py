"""Deaths at the worst moment: the scheduler's, a worker's, both; and a worker that was only taken for dead."""

import asyncio
import contextlib
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest

from tests.stack import references
from tests.stack.fleet import Fleet, post_all
from tests.stack.processes import wait_until

STEPS = 20


@pytest.fixture
def no_workers(tmp_path: Path) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        yield Fleet(tmp_path, stack)


@pytest.fixture
def fleet(no_workers: Fleet) -> Fleet:
    """Workers "one" and "two"."""
    no_workers.start_worker("one")
    no_workers.start_worker("two")
    no_workers.wait_for_workers()
    return no_workers


@pytest.fixture(scope="module")
def pipeline() -> diffusers.DiffusionPipeline:
    return references.load_demo()


def bodies(count: int, **changes: Any) -> list[dict[str, Any]]:
    """Different pictures of one shape, so that they run together."""
    prompts = ["red apple", "green frog", "house", "pizza"]
    common = {"size": "64x64", "num_inference_steps": STEPS, "guidance_scale": 4.0, "max_sequence_length": 20}
    return [common | {"prompt": prompts[index % 4], "seed": 100 + index} | changes for index in range(count)]


def lines(fleet: Fleet, name: str, event: str) -> list[dict[str, Any]]:
    return [line for line in fleet.lines_of(name) if line["event"] == event]


def found_again(fleet: Fleet, name: str, event: str) -> bool:
    return len(lines(fleet, name, event)) > 1


def when(line: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(line["timestamp"])


def steps_by_request(fleet: Fleet, name: str) -> Counter[str]:
    """How many steps of each request a worker has run."""
    return Counter(request_id for line in fleet.steps_of(name) for request_id in line["requests"])


def at_work(fleet: Fleet, steps: int) -> bool:
    return all(len(fleet.steps_of(name)) > steps for name in ("one", "two"))


def assert_all_are_solo(
    pipeline: diffusers.DiffusionPipeline, asked: list[dict[str, Any]], replies: list[tuple[int, Any]]
) -> None:
    for each, reply in zip(asked, replies, strict=True):
        references.assert_is_solo(pipeline, each, reply)


async def test_a_scheduler_that_starts_again_costs_no_request_a_step(
    fleet: Fleet, pipeline: diffusers.DiffusionPipeline
) -> None:
    asked = bodies(12, num_inference_steps=40)
    posted = asyncio.ensure_future(post_all(fleet, asked))
    await asyncio.to_thread(wait_until, lambda: at_work(fleet, 5), "both are at work")
    await asyncio.to_thread(fleet.restart_scheduler)
    before = {name: len(fleet.steps_of(name)) for name in ("one", "two")}
    replies = await posted
    assert_all_are_solo(pipeline, asked, replies)
    for name in ("one", "two"):
        assert len(fleet.steps_of(name)) > before[name], f"{name} did nothing after the restart"
        # Each was taken in once and ran each of its steps once.
        admitted = Counter(line["request_id"] for line in lines(fleet, name, "admitted"))
        assert set(admitted.values()) == {1}
        assert steps_by_request(fleet, name) == dict.fromkeys(admitted, 40)
    completed = [line["request_id"] for name in ("one", "two") for line in lines(fleet, name, "completed")]
    assert len(completed) == len(set(completed)) == len(asked)


async def test_workers_and_gateway_find_a_scheduler_that_starts_again_within_a_second(fleet: Fleet) -> None:
    await asyncio.to_thread(fleet.restart_scheduler)
    listens = [line for line in fleet.lines_of("scheduler") if line["event"] == "scheduler listens"][-1]
    finds = {"one": "welcomed", "two": "welcomed", "gateway": "scheduler joined"}
    for name, event in finds.items():
        await asyncio.to_thread(wait_until, partial(found_again, fleet, name, event), f"{name} has found it")
        found = lines(fleet, name, event)[-1]
        assert (when(found) - when(listens)).total_seconds() < 1.0


async def test_a_worker_and_a_moment_later_the_scheduler_die_and_no_request_is_lost(
    fleet: Fleet, pipeline: diffusers.DiffusionPipeline
) -> None:
    asked = bodies(24)
    posted = asyncio.ensure_future(post_all(fleet, asked))
    await asyncio.to_thread(wait_until, lambda: at_work(fleet, 8), "both are at work")
    fleet.kill("one")
    steps = len(fleet.steps_of("two"))
    await asyncio.to_thread(wait_until, lambda: len(fleet.steps_of("two")) > steps + 2, "a moment has passed")
    await asyncio.to_thread(fleet.restart_scheduler)
    replies = await posted
    assert_all_are_solo(pipeline, asked, replies)
    # What the survivor had went on, and what came to it from the other ran once.
    admitted = Counter(line["request_id"] for line in lines(fleet, "two", "admitted"))
    assert set(admitted.values()) == {1}
    assert set(steps_by_request(fleet, "two").values()) == {STEPS}
    completed = Counter(line["request_id"] for name in ("one", "two") for line in lines(fleet, name, "completed"))
    assert len(completed) == len(asked)
    assert set(completed.values()) == {1}


async def test_a_worker_that_sleeps_past_its_deadline_and_goes_on_harms_nobody(
    fleet: Fleet, pipeline: diffusers.DiffusionPipeline
) -> None:
    asked = bodies(12)
    posted = asyncio.ensure_future(post_all(fleet, asked))
    await asyncio.to_thread(wait_until, lambda: at_work(fleet, 3), "both are at work")
    sleeper = fleet.workers["one"]
    sleeper.send_signal(signal.SIGSTOP)
    had = {line["request_id"] for line in lines(fleet, "one", "admitted")}
    had -= {line["request_id"] for line in lines(fleet, "one", "completed")}

    def moved() -> bool:
        return had <= {line["request_id"] for line in lines(fleet, "two", "admitted")}

    try:
        await asyncio.to_thread(wait_until, moved, "its work is done by the other")
    finally:
        sleeper.send_signal(signal.SIGCONT)
    replies = await posted
    assert_all_are_solo(pipeline, asked, replies)
    await asyncio.to_thread(fleet.wait_for_workers)  # it is taken back
    before = len(fleet.steps_of("one"))
    more = bodies(6, seed=7)
    assert_all_are_solo(pipeline, more, await post_all(fleet, more))
    assert len(fleet.steps_of("one")) > before, "it is given work again"


@pytest.mark.parametrize("how", ["die", "break"])
async def test_a_request_that_kills_its_workers_gets_two_of_them_and_no_third_and_harms_nobody(
    no_workers: Fleet, pipeline: diffusers.DiffusionPipeline, how: str
) -> None:
    fleet = no_workers
    for name in ("one", "two", "three"):
        fleet.start_worker(name, program=[sys.executable, "-m", "tests.stack.faulty_worker"])
    await asyncio.to_thread(fleet.wait_for_workers)
    asked = bodies(12)
    (status, answer), *replies = await post_all(fleet, [*bodies(1, prompt=f"{how} denoise_step"), *asked])
    assert (status, answer["error"]["code"]) == (500, "worker_died_twice")
    assert_all_are_solo(pipeline, asked, replies)
    died = [name for name, worker in fleet.workers.items() if worker.poll() is not None]
    assert len(died) == 2
