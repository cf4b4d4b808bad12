"""The worker as a scheduler and a gateway see it: real sockets, the demo model."""

import asyncio
import contextlib
import io
import threading
from collections.abc import AsyncIterator
from typing import NamedTuple

import numpy as np
import pytest
import zmq.asyncio
from PIL import Image

from common import messages as m
from common.config import WorkerConfig
from common.errors import ConfigError, ErrorInfo
from common.params import DiffusionRequest
from services.demo import DEMO_CHECKPOINT
from services.worker.image import read_metadata
from services.worker.pipelines.protocol import StepPipeline
from services.worker.runner import StepRunner
from services.worker.service import serve_worker
from tests import builders
from tests.worker.peers import DEADLINE_S, FakeGateway, FakeScheduler, group, zmq_context
from tests.worker.solo import draw_solo, worst_difference


class Stack(NamedTuple):
    context: zmq.asyncio.Context
    scheduler: FakeScheduler
    gateway: FakeGateway
    worker: asyncio.Task[None]

    def request(self, request_id: str = "r1", **changes: object) -> DiffusionRequest:
        return builders.request(request_id, home=self.gateway.home, **changes)


def worker_config(scheduler: str) -> WorkerConfig:
    return WorkerConfig(model=str(DEMO_CHECKPOINT), served_model_name="demo", scheduler=scheduler, threads=1)


@pytest.fixture
async def stack(demo: StepPipeline) -> AsyncIterator[Stack]:
    async with zmq_context() as context:
        scheduler, gateway = FakeScheduler(context), FakeGateway(context)
        worker = asyncio.create_task(serve_worker(worker_config(scheduler.address), lambda *_: demo))
        try:
            yield Stack(context, scheduler, gateway, worker)
        finally:
            if not worker.done():
                worker.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait_for(worker, DEADLINE_S)
            scheduler.close()
            gateway.close()


async def test_says_hello_with_the_models_profile_once_it_has_drawn_its_warm_up_picture(stack: Stack) -> None:
    hello = await stack.scheduler.greeted()
    assert hello.worker_id == stack.scheduler.worker_id
    assert hello.protocol_version == m.PROTOCOL_VERSION
    assert hello.profile.model == "demo"
    assert (hello.profile.default_num_inference_steps, hello.profile.default_guidance_scale) == (20, 4.0)
    assert (hello.profile.default_width, hello.profile.size.max_side) == (64, 192)
    assert (hello.limits.max_num_seqs, hello.limits.max_residents) == (8, 16)
    assert hello.cost.floor_s > 0
    assert hello.cost.per_token_s > 0
    assert hello.residents == ()


async def test_draws_the_picture_that_diffusers_draws_alone(stack: Stack, demo: StepPipeline) -> None:
    asked = {"prompt": "green frog", "negative_prompt": "blue", "seed": 7, "num_inference_steps": 4}
    request = stack.request(**asked, max_sequence_length=20)
    await stack.scheduler.greeted()
    stack.scheduler.plan(new=(m.NewRequest(request, 1),))
    ready = await stack.scheduler.first(m.RequestReady)
    assert (ready.request_id, ready.step_index, ready.total_steps, ready.last_step_id) == ("r1", 0, 4, 1)

    plan = stack.scheduler.plan(group(("r1", 4)))
    done = await stack.scheduler.first(m.RequestDone)

    assert (done.outcome, done.error, done.attempt) == ("completed", None, 1)
    results = [result for result in stack.scheduler.messages(m.StepResult) if result.step_id == plan.step_id]
    assert [result.progress[0].step_index for result in results] == [1, 2, 3, 4]
    assert [result.plan_done for result in results] == [False, False, False, True]
    assert results[0].timings[0].rows == 2
    output = stack.gateway.messages(m.ImageOutput)[0]
    assert (output.width, output.height, output.total_steps, output.output_format) == (64, 64, 4, "png")
    data = stack.gateway.pictures("r1")[0]
    assert output.nbytes == len(data)
    assert worst_difference(Image.open(io.BytesIO(data)), draw_solo(demo, request.params)) <= 1
    assert read_metadata(data)["seed"] == 7
    timings = done.timings
    assert min(timings.encode_s, timings.denoise_s, timings.decode_s, timings.image_s) > 0


async def test_a_request_released_half_way_is_forgotten_without_a_word(stack: Stack) -> None:
    await stack.scheduler.greeted()
    stack.scheduler.plan(new=(m.NewRequest(stack.request("a", num_inference_steps=40), 1),))
    await stack.scheduler.first(m.RequestReady)
    stack.scheduler.plan(group(("a", 40)))
    await stack.scheduler.first(m.StepResult, lambda result: result.progress)
    released = (m.ReleasedRequest("a", 1, "aborted"),)
    stack.scheduler.plan(new=(m.NewRequest(stack.request("b"), 1),), released=released, starts="next_boundary")
    await stack.scheduler.first(m.RequestReady, lambda ready: ready.request_id == "b")
    stack.scheduler.plan(group(("b", 4)), starts="next_boundary")
    done = await stack.scheduler.first(m.RequestDone)
    assert done.request_id == "b"
    assert stack.gateway.pictures("a") == []
    beat = await stack.scheduler.first(m.WorkerHeartbeat, lambda beat: beat.last_step_id == 4 and beat.idle)
    assert "a" not in [resident.request_id for resident in beat.residents]


async def test_a_new_scheduler_is_told_what_the_worker_holds(stack: Stack) -> None:
    await stack.scheduler.greeted()
    stack.scheduler.plan(new=(m.NewRequest(stack.request(num_inference_steps=10), 3),))
    await stack.scheduler.first(m.RequestReady)
    stack.scheduler.plan(group(("r1", 5), attempt=3))
    await stack.scheduler.first(m.StepResult, lambda result: result.plan_done and result.step_id == 2)

    stack.scheduler.boot_id, stack.scheduler.step_id = "boot-2", 0
    stack.scheduler.send(m.Welcome("boot-2"))

    hello = await stack.scheduler.greeted()
    assert hello.residents == (m.Resident("r1", 3, "denoising", step_index=5, total_steps=10),)
    assert hello.last_step_id == 0
    stack.scheduler.plan(group(("r1", 10), attempt=3))
    done = await stack.scheduler.first(m.RequestDone)
    assert (done.outcome, done.attempt) == ("completed", 3)


async def test_a_plan_of_an_earlier_scheduler_is_ignored(stack: Stack) -> None:
    await stack.scheduler.greeted()
    stack.scheduler.boot_id = "boot-2"
    stack.scheduler.send(m.Welcome("boot-2"))
    await stack.scheduler.greeted()
    stack.scheduler.send(m.StepPlan("boot-1", 99, new=(m.NewRequest(stack.request("old"), 1),)))
    stack.scheduler.plan(new=(m.NewRequest(stack.request("new"), 1),))
    ready = await stack.scheduler.first(m.RequestReady)
    assert ready.request_id == "new"
    beat = await stack.scheduler.first(m.WorkerHeartbeat, lambda beat: beat.residents)
    assert [resident.request_id for resident in beat.residents] == ["new"]


async def test_a_repeated_new_is_ignored_and_a_newer_attempt_starts_over(stack: Stack) -> None:
    await stack.scheduler.greeted()
    first = m.NewRequest(stack.request(), 1)
    stack.scheduler.plan(new=(first,))
    stack.scheduler.plan(new=(first,))
    await stack.scheduler.first(m.RequestReady)
    stack.scheduler.plan(group(("r1", 2)), new=(first,))
    await stack.scheduler.first(m.StepResult, lambda result: result.plan_done and result.step_id == 3)
    assert len(stack.scheduler.messages(m.RequestReady)) == 1

    stack.scheduler.plan(new=(m.NewRequest(stack.request(), 2),))
    ready = await stack.scheduler.first(m.RequestReady, lambda ready: ready.attempt == 2)
    assert ready.step_index == 0
    stack.scheduler.plan(group(("r1", 4), attempt=2))
    done = await stack.scheduler.first(m.RequestDone)
    assert done.attempt == 2


async def test_a_new_that_comes_again_after_its_end_is_answered_again(stack: Stack) -> None:
    await stack.scheduler.greeted()
    new = (m.NewRequest(stack.request(), 1),)
    stack.scheduler.plan(new=new)
    await stack.scheduler.first(m.RequestReady)
    stack.scheduler.plan(group(("r1", 4)))
    await stack.scheduler.first(m.RequestDone)
    stack.scheduler.plan(new=new)
    await stack.scheduler.until(lambda: len(stack.scheduler.messages(m.RequestDone)) == 2)
    assert len(stack.gateway.pictures("r1")) == 1


async def test_a_request_that_can_not_be_prepared_ends_with_the_reason(stack: Stack) -> None:
    await stack.scheduler.greeted()
    stack.scheduler.plan(new=(m.NewRequest(stack.request(width=63), 1),))
    done = await stack.scheduler.first(m.RequestDone)
    assert done.outcome == "error"
    assert done.error is not None
    assert done.error.code == "invalid_request"
    assert "divisible" in done.error.message


async def test_a_too_long_prompt_is_cut_and_the_gateway_is_told(stack: Stack) -> None:
    await stack.scheduler.greeted()
    stack.scheduler.plan(new=(m.NewRequest(stack.request(prompt="red apple " * 30, num_inference_steps=1), 1),))
    await stack.scheduler.first(m.RequestReady)
    stack.scheduler.plan(group(("r1", 1)))
    output = await stack.gateway.first(m.ImageOutput)
    assert len(output.warnings) == 2
    assert "takes 20 tokens: the last 42 were dropped" in output.warnings[0]


async def test_told_to_stop_it_says_so_and_ends(stack: Stack) -> None:
    await stack.scheduler.greeted()
    stack.scheduler.plan(new=(m.NewRequest(stack.request(num_inference_steps=200), 1),))
    await stack.scheduler.first(m.RequestReady)
    stack.scheduler.plan(group(("r1", 200)))
    await stack.scheduler.first(m.StepResult, lambda result: result.progress)
    stack.worker.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait_for(stack.worker, 3.0)
    last = await stack.scheduler.first(m.WorkerDraining)
    assert last.leaving
    assert stack.scheduler.received[-1].message is last


async def test_told_to_drain_it_finishes_what_it_holds_and_ends(stack: Stack) -> None:
    await stack.scheduler.greeted()
    stack.scheduler.plan(new=(m.NewRequest(stack.request(), 1),))
    await stack.scheduler.first(m.RequestReady)
    stack.scheduler.send(m.DrainWorker("boot-1", deadline_s=DEADLINE_S))
    await stack.scheduler.first(m.WorkerDraining, lambda draining: not draining.leaving)
    stack.scheduler.plan(group(("r1", 4)), new=(m.NewRequest(stack.request("late"), 1),))
    await asyncio.wait_for(stack.worker, DEADLINE_S)
    await stack.scheduler.first(m.WorkerDraining, lambda draining: draining.leaving)
    assert [done.request_id for done in stack.scheduler.messages(m.RequestDone)] == ["r1"]


async def test_a_refused_worker_ends_with_the_schedulers_reason(stack: Stack) -> None:
    await stack.scheduler.greeted()
    stack.scheduler.send(m.Refused("boot-1", ErrorInfo("protocol_mismatch", "another profile under this name")))
    with pytest.raises(ConfigError, match="another profile under this name"):
        await asyncio.wait_for(stack.worker, DEADLINE_S)


def test_pictures_of_the_tests_differ_where_requests_do(demo: StepPipeline) -> None:
    one = draw_solo(demo, builders.params(prompt="green frog", seed=7))
    other = draw_solo(demo, builders.params(prompt="red apple", seed=7))
    assert worst_difference(one, other) >= 16
    assert np.asarray(one).shape == (64, 64, 3)


async def test_a_failure_under_an_earlier_schedulers_plan_is_told_to_the_new_one(
    stack: Stack, demo: StepPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stack.scheduler.greeted()
    stack.scheduler.plan(new=(m.NewRequest(stack.request(num_inference_steps=10), 1),))
    await stack.scheduler.first(m.RequestReady)
    reached, go = threading.Event(), threading.Event()

    def fails_later(*_: object) -> None:
        reached.set()
        assert go.wait(DEADLINE_S)
        raise RuntimeError("as the test wanted")

    monkeypatch.setattr(demo, "denoise_step", fails_later)
    stack.scheduler.plan(group(("r1", 10)))
    assert await asyncio.to_thread(reached.wait, DEADLINE_S)
    stack.scheduler.boot_id = "boot-2"
    stack.scheduler.send(m.Welcome("boot-2"))
    await stack.scheduler.greeted()
    go.set()
    done = await stack.scheduler.first(m.RequestDone)
    assert done.error is not None
    assert (done.request_id, done.error.code) == ("r1", "generation_failed")
    assert not any(result.failed for result in stack.scheduler.messages(m.StepResult))


async def test_a_request_released_while_its_picture_is_under_way_is_forgotten(stack: Stack) -> None:
    stack.gateway.acknowledges = False
    await stack.scheduler.greeted()
    stack.scheduler.plan(new=(m.NewRequest(stack.request(num_inference_steps=1), 1),))
    await stack.scheduler.first(m.RequestReady)
    stack.scheduler.plan(group(("r1", 1)))
    await stack.gateway.first(m.ImageOutput)
    beat = await stack.scheduler.first(
        m.WorkerHeartbeat, lambda beat: any(r.phase == "decoding" for r in beat.residents)
    )
    assert beat.residents == (m.Resident("r1", 1, "decoding", step_index=1, total_steps=1),)
    stack.scheduler.plan(released=(m.ReleasedRequest("r1", 1, "aborted"),))
    await stack.scheduler.first(m.WorkerHeartbeat, lambda beat: beat.last_step_id == 3 and not beat.residents)
    assert stack.scheduler.messages(m.RequestDone) == []


async def test_a_step_thread_that_breaks_ends_the_worker(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    await stack.scheduler.greeted()
    stack.scheduler.plan(new=(m.NewRequest(stack.request(), 1),))
    await stack.scheduler.first(m.RequestReady)

    def broken(*_: object) -> None:
        raise MemoryError("a fault of ours")

    monkeypatch.setattr(StepRunner, "run_group", broken)
    stack.scheduler.plan(group(("r1", 4)))
    with pytest.raises(MemoryError, match="a fault of ours"):
        await asyncio.wait_for(stack.worker, DEADLINE_S)
    assert (await stack.scheduler.first(m.WorkerDraining)).reason == "failed"
