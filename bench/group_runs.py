"""Requests denoised to the end in given groups, by the worker's own runner, with their time and their forwards counted.

Role: `GroupRuns`. The runner puts what can share a forward into one, as it does on a worker. Only denoising is timed:
requests are prepared before, and nothing is decoded. Everything is done on one thread, as a worker's steps are.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from common.errors import RequestError
from common.messages import StepCost
from common.params import DataHome, DiffusionRequest, SamplingParams
from services.worker.input_batch import StepInputBatch
from services.worker.pipelines.protocol import StepPipeline
from services.worker.preparation import Preparation
from services.worker.runner import StepRunner
from services.worker.state import DiffusionRequestState
from services.worker.streams import synchronize, torch_thread
from services.worker.warmup import warm_up

WARM_UP_STEPS = 50  # more than a warm-up picture has
NOWHERE = DataHome(gateway_id="", address="")

Group = Sequence[SamplingParams]


class Run(NamedTuple):
    """What became of it."""

    seconds: float
    forwards: int
    rows: int  # summed over the forwards
    tokens: int  # image tokens, summed over rows and forwards
    padded_tokens: int  # the same if every row had as many as the longest in its forward


class GroupRuns:
    """Runs on one loaded pipeline, with so many torch threads."""

    def __init__(self, pipeline: StepPipeline, threads: int) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._on_thread = torch_thread(pipeline.device, threads)
        self._thread.submit(self._on_thread.__enter__).result()
        self._device = pipeline.device
        self._counted: Any = _Counted(pipeline)  # as much of a `StepPipeline` as the runner uses
        self._preparation = Preparation(pipeline)
        self._cost = self._thread.submit(self._measured_cost, pipeline).result()

    def run(self, stages: Sequence[Sequence[Group]]) -> Run:
        """All requests to their end. The groups of a stage take turns, a step each; its last one ends it.

        Raises `RequestError` if a request fails: the others' time would say nothing.
        """
        return self._thread.submit(self._run, stages).result()

    def _run(self, stages: Sequence[Sequence[Group]]) -> Run:
        counted = self._counted
        counted.forwards = counted.rows = counted.tokens = counted.padded_tokens = 0
        runner = StepRunner(counted)
        runner.cost = self._cost
        prepared = [[self._prepared(group, runner) for group in groups] for groups in stages]
        synchronize(self._device)
        begun = time.perf_counter()
        for groups in prepared:
            left = groups
            while left:
                left = [going for group in left if (going := _step(runner, group))]
        synchronize(self._device)
        seconds = time.perf_counter() - begun
        _raise_first(runner.settle())
        return Run(seconds, counted.forwards, counted.rows, counted.tokens, counted.padded_tokens)

    def _measured_cost(self, pipeline: StepPipeline) -> StepCost:
        """As a worker measures it when it starts; it decides which sizes are padded to share a forward."""
        return warm_up(pipeline, self._preparation, StepRunner(pipeline), pipeline.profile("", WARM_UP_STEPS))

    def _prepared(self, group: Group, runner: StepRunner) -> list[DiffusionRequestState]:
        states = []
        for params in group:
            request = DiffusionRequest(request_id=f"seed-{params.seed}", model="", params=params, home=NOWHERE)
            states.append(self._preparation.prepare_one(request))
            runner.add(states[-1])
        return states


class _Counted:
    """What `StepRunner` uses of a pipeline, with its forwards counted."""

    def __init__(self, pipeline: StepPipeline) -> None:
        self._denoise_step = pipeline.denoise_step
        self.step_scheduler = pipeline.step_scheduler
        self.device, self.mixes, self.heeds_prompt_mask = pipeline.device, pipeline.mixes, pipeline.heeds_prompt_mask
        self.forwards = self.rows = self.tokens = self.padded_tokens = 0

    def denoise_step(self, input_batch: StepInputBatch) -> Sequence[torch.Tensor]:
        tokens = [state.image_tokens for state in input_batch.row_states]
        self.forwards += 1
        self.rows += len(tokens)
        self.tokens += sum(tokens)
        self.padded_tokens += len(tokens) * max(tokens)
        return self._denoise_step(input_batch)


def _step(runner: StepRunner, group: Sequence[DiffusionRequestState]) -> list[DiffusionRequestState]:
    """One step of a group. Returns those who have more before them."""
    _raise_first(runner.run_group(group).failed)
    for state in group:
        if state.step_index == state.total_steps:
            runner.remove(state.request_id)
    return [state for state in group if state.step_index < state.total_steps]


def _raise_first(failed: Sequence[tuple[Any, Any]]) -> None:
    for _, error in failed:
        raise RequestError(error)
