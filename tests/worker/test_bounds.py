"""What a worker lets go of, in time: states, memories of what is over, old plans, and work that nobody can take."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import pytest
import torch
from PIL import Image

from common import messages as m
from common.config import WorkerConfig
from common.errors import ErrorInfo
from common.params import DiffusionRequest
from services.worker import residents
from services.worker.runner import StepRunner
from services.worker.service import serve_worker
from services.worker.state import DiffusionRequestState
from tests import builders
from tests.worker.driving import Wrapped, draw_together, prepared, request
from tests.worker.masked import MaskedPipeline
from tests.worker.peers import DEADLINE_S, FakeGateway, FakeScheduler, group, zmq_context

STEPS = 4  # of each request here


class Recording(Wrapped):
    """Remembers what was asked of it."""

    def __init__(self) -> None:
        super().__init__(MaskedPipeline())
        self.solved: list[tuple[str, int]] = []  # request id and the steps behind it
        self.decoded: list[str] = []

    def step_scheduler(
        self, states: Sequence[DiffusionRequestState], noise_preds: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | Exception]:
        self.solved += [(state.request_id, state.step_index) for state in states]
        return self.inner.step_scheduler(states, noise_preds)

    def post_decode(self, state: DiffusionRequestState) -> Image.Image:
        self.decoded.append(state.request_id)
        return self.inner.post_decode(state)


# The runner


async def test_latents_that_are_not_numbers_end_their_request_at_that_step() -> None:
    class Faulty(Recording):
        def step_scheduler(
            self, states: Sequence[DiffusionRequestState], noise_preds: Sequence[torch.Tensor]
        ) -> list[torch.Tensor | Exception]:
            latents = super().step_scheduler(states, noise_preds)
            for state, new in zip(states, latents, strict=True):
                if state.request_id == "culprit" and state.step_index == 2:
                    new[0, 0, 0, 0] = float("nan")  # type: ignore[index]
            return latents

    faulty = Faulty()
    outcomes = await draw_together(faulty, {0: [request("good"), request("culprit")]})
    assert [step for request_id, step in faulty.solved if request_id == "culprit"] == [0, 1, 2]
    assert faulty.decoded == ["good"]
    ended = outcomes["culprit"]
    assert isinstance(ended, ErrorInfo)
    assert ended.code == "non_finite"
    assert "latents" in ended.message


def test_the_tensors_of_a_removed_request_are_freed_while_its_neighbour_goes_on() -> None:
    pipeline = MaskedPipeline()
    runner = StepRunner(pipeline)
    with torch.inference_mode():
        states = [prepared(pipeline, request(name)) for name in ("gone", "stays")]
        for state in states:
            runner.add(state)
        runner.run_group(states)
        held = [weakref.ref(tensor) for tensor in (states[0].latents, states[0].cond.prompt_embeds)]
        del state, states
        gc.collect()
        assert all(tensor() is not None for tensor in held)  # the runner holds them
        runner.remove("gone")
        gc.collect()
        assert [tensor() for tensor in held] == [None, None]
        assert runner.get("stays") is not None


# The whole worker


class Stack(NamedTuple):
    scheduler: FakeScheduler
    gateway: FakeGateway
    pipeline: Recording

    def new(self, request_id: str) -> m.NewRequest:
        return m.NewRequest(self.request(request_id), 1)

    def request(self, request_id: str) -> DiffusionRequest:
        return builders.request(request_id, home=self.gateway.home, num_inference_steps=STEPS)

    async def denoise(self, request_id: str) -> None:
        """Has the worker take a request in and do all of its steps."""
        self.scheduler.plan(new=(self.new(request_id),))
        await self.scheduler.first(m.RequestReady, lambda ready: ready.request_id == request_id)
        plan = self.scheduler.plan(group((request_id, STEPS)))
        await self.scheduler.first(m.StepResult, lambda result: result.plan_done and result.step_id == plan.step_id)

    async def complete(self, request_id: str) -> None:
        await self.denoise(request_id)
        await self.scheduler.first(m.RequestDone, lambda done: done.request_id == request_id)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with zmq_context() as context:
        scheduler, gateway, pipeline = FakeScheduler(context), FakeGateway(context), Recording()
        config = WorkerConfig(model="masked", served_model_name="demo", scheduler=scheduler.address, threads=1)
        worker = asyncio.create_task(serve_worker(config, lambda *_: pipeline))
        try:
            await scheduler.greeted()
            pipeline.decoded.clear()  # the warm-up picture
            yield Stack(scheduler, gateway, pipeline)
        finally:
            worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(worker, DEADLINE_S)
            scheduler.close()
            gateway.close()


async def test_a_completed_request_is_forgotten_by_the_step_thread(stack: Stack) -> None:
    await stack.complete("r1")
    plan = stack.scheduler.plan(group(("r1", STEPS)))
    result = await stack.scheduler.first(m.StepResult, lambda result: result.step_id == plan.step_id)
    # Of a request that has only left for decode it would know that its steps are done.
    assert (result.skipped, result.plan_done) == (("r1",), True)


async def test_a_request_released_while_its_picture_is_under_way_is_forgotten_by_the_step_thread(stack: Stack) -> None:
    stack.gateway.acknowledges = False
    await stack.denoise("r1")
    await stack.gateway.first(m.ImageOutput)
    plan = stack.scheduler.plan(group(("r1", STEPS)))
    result = await stack.scheduler.first(m.StepResult, lambda result: result.step_id == plan.step_id)
    assert (result.skipped, result.plan_done) == ((), True)
    plan = stack.scheduler.plan(group(("r1", STEPS)), released=(m.ReleasedRequest("r1", 1, "aborted"),))
    result = await stack.scheduler.first(m.StepResult, lambda result: result.step_id == plan.step_id)
    assert (result.skipped, result.plan_done) == (("r1",), True)


async def test_the_memory_of_requests_that_are_over_is_bounded(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residents, "REMEMBERED", 2)
    for name in ("r1", "r2", "r3"):
        await stack.complete(name)

    def answers(kind: type[m.RequestReady] | type[m.RequestDone], request_id: str) -> int:
        return sum(message.request_id == request_id for message in stack.scheduler.messages(kind))

    stack.scheduler.plan(new=(stack.new("r3"),))
    await stack.scheduler.until(lambda: answers(m.RequestDone, "r3") == 2)
    assert answers(m.RequestReady, "r3") == 1  # remembered: answered again
    stack.scheduler.plan(new=(stack.new("r1"),))
    await stack.scheduler.until(lambda: answers(m.RequestReady, "r1") + answers(m.RequestDone, "r1") == 3)
    assert answers(m.RequestReady, "r1") == 2  # forgotten: taken for a new one


async def test_without_credit_no_further_picture_is_decoded(stack: Stack) -> None:
    stack.gateway.acknowledges = False
    await stack.denoise("r0")
    await stack.gateway.first(m.ImageOutput)
    stack.gateway.acknowledge(stack.gateway.received[-1], credit_bytes=1)  # one picture at a time
    await stack.scheduler.first(m.RequestDone)
    await stack.denoise("r1")
    await stack.gateway.until(lambda: stack.gateway.pictures("r1"))
    await stack.denoise("r2")
    await stack.scheduler.first(m.WorkerHeartbeat, lambda beat: beat.credit_stalled)
    assert stack.pipeline.decoded == ["r0", "r1"]

    stack.gateway.acknowledge(stack.gateway.received[-1])
    await stack.gateway.until(lambda: stack.gateway.pictures("r2"))
    assert stack.pipeline.decoded == ["r0", "r1", "r2"]


async def test_a_plan_older_than_the_newest_is_ignored(stack: Stack) -> None:
    stack.scheduler.step_id = 10
    stack.scheduler.plan(new=(stack.new("first"),))
    await stack.scheduler.first(m.RequestReady)
    released = (m.ReleasedRequest("first", 1, "aborted"),)
    stack.scheduler.send(m.StepPlan(stack.scheduler.boot_id, 5, new=(stack.new("late"),), released=released))
    stack.scheduler.plan(new=(stack.new("second"),))
    # Requests are prepared in the order in which they came.
    await stack.scheduler.first(m.RequestReady, lambda ready: ready.request_id == "second")
    assert [ready.request_id for ready in stack.scheduler.messages(m.RequestReady)] == ["first", "second"]
    beat = await stack.scheduler.first(m.WorkerHeartbeat, lambda beat: beat.last_step_id == 12)
    assert [resident.request_id for resident in beat.residents] == ["first", "second"]
