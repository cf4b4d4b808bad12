"""`stepweave worker`: load the model, draw the warm-up picture, serve, leave in order.

Role: the shell. It makes the worker's parts, joins them and ends them; what they do is in their own files. The config
is read here and goes no further.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import zmq.asyncio

from common.config import WorkerConfig, new_peer_id
from common.messages import ModelProfile, StepCost, WorkerLimits
from common.metrics import exposed, new_registry
from common.telemetry import identify
from services.worker.delivery import Delivery
from services.worker.jobs import JobThreads
from services.worker.loader import load_pipeline, load_whole_pipeline
from services.worker.metrics import WorkerMetrics
from services.worker.pipelines.protocol import StepPipeline
from services.worker.pipelines.whole_call import WholeCallPipeline
from services.worker.preparation import Preparation
from services.worker.request_runner import RequestRunner
from services.worker.request_warmup import prove
from services.worker.residents import Residents
from services.worker.runner import StepRunner
from services.worker.session import Introduction, Session
from services.worker.side import Prepare, SideExecutor, one_by_one
from services.worker.step_thread import Boundary, GroupRunner, StepThread
from services.worker.streams import torch_thread
from services.worker.switches import Switches
from services.worker.warmup import warm_up

log = structlog.get_logger()

STOP_S = 2.0  # how long the last step may take when the worker is told to stop

# model, device, dtype, switches → a `StepPipeline` or, without step execution, a `WholeCallPipeline`
Load = Callable[[str, str, str, Switches], Any]


class _Ready(NamedTuple):
    """A model that has drawn its warm-up picture."""

    pipeline: StepPipeline | WholeCallPipeline
    prepare: Prepare
    preparation: Preparation | None  # None in request mode, where nothing is encoded beside the calls
    runner: GroupRunner
    profile: ModelProfile
    cost: StepCost
    max_num_seqs: int


async def serve_worker(config: WorkerConfig, load: Load | None = None) -> None:
    """Runs until cancelled or drained. Raises `ConfigError` if the model can't be served or the worker is refused."""
    worker_id = new_peer_id(config.name)
    identify(worker_id=worker_id)
    registry = new_registry()
    async with exposed(registry, config.metrics_host, config.metrics_port):
        loading = JobThreads("load")
        try:
            ready = await loading.run(_load_and_warm_up, config, load)
        finally:
            loading.close()
        context = zmq.asyncio.Context()
        try:
            await _serve(config, context, worker_id, ready, WorkerMetrics(registry, ready.profile.model))
        finally:
            context.term()  # waits for the last words, `transport.FLUSH_MS` at most


async def _serve(
    config: WorkerConfig, context: zmq.asyncio.Context, worker_id: str, ready: _Ready, metrics: WorkerMetrics
) -> None:
    delivery = Delivery(context, worker_id)
    limits = WorkerLimits(max_num_seqs=ready.max_num_seqs, max_residents=config.max_residents or 2 * ready.max_num_seqs)
    introduction = Introduction(
        worker_id, ready.profile, ready.cost, limits, str(ready.pipeline.device), config.step_execution
    )
    session = Session(context, config.scheduler, introduction, delivery)
    side = SideExecutor(ready.pipeline, ready.prepare, config.threads)
    loop = asyncio.get_running_loop()
    crashed: asyncio.Future[None] = loop.create_future()

    def on_boundary(boundary: Boundary) -> None:
        loop.call_soon_threadsafe(on_boundary_here, boundary)

    def on_boundary_here(boundary: Boundary) -> None:
        metrics.stepped(boundary.result)
        session.on_boundary(boundary)

    def on_crash(error: BaseException) -> None:
        loop.call_soon_threadsafe(crashed.set_exception, error)

    steps = StepThread(ready.runner, worker_id, on_boundary, on_crash)
    residents = Residents(worker_id, side, steps, delivery, session.send, session.last_step_id, metrics.request_ended)
    session.residents = residents
    session.steps = steps
    metrics.watch(introduction, session, residents, delivery, ready.preparation, loop)
    steps.start()
    log.info("serving", worker_id=worker_id, model=ready.profile.model, device=introduction.device)
    serving = asyncio.create_task(session.run())
    reason = "stopped"
    try:
        await asyncio.wait([serving, crashed], return_when=asyncio.FIRST_COMPLETED)
        reason = "failed" if crashed.done() else "drained"
        for ended in (crashed, serving):
            if ended.done():
                ended.result()
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        session.leave(reason, failed=crashed.done())
        await residents.close()
        if not steps.stop(STOP_S):
            log.warning("the step that was running did not end in time")
        side.close()
        delivery.close()
        session.close()


def _load_and_warm_up(config: WorkerConfig, load: Load | None) -> _Ready:
    begun = time.monotonic()
    log.info("loading", model=config.model, device=config.device, dtype=config.dtype)
    if load is None:
        load = load_pipeline if config.step_execution else load_whole_pipeline
    switches = Switches(config.vae_tiling, config.vae_slicing, config.offload, config.compile)
    pipeline = load(config.model, config.device, config.dtype, switches)
    loaded = time.monotonic()
    folder = Path(config.model)
    name = config.served_model_name or (folder.resolve().name if folder.is_dir() else folder.name)
    with torch_thread(pipeline.device, config.threads):
        warm_up_mode = _warm_up_steps if config.step_execution else _warm_up_calls
        ready = warm_up_mode(pipeline, name, config)
    log.info(
        "warm-up picture drawn",
        model=name,
        load_s=round(loaded - begun, 2),
        warm_up_s=round(time.monotonic() - loaded, 2),
        floor_ms=round(1000 * ready.cost.floor_s, 2),
        per_token_us=round(1_000_000 * ready.cost.per_token_s, 2),
    )
    return ready


def _warm_up_steps(pipeline: StepPipeline, name: str, config: WorkerConfig) -> _Ready:
    profile = pipeline.profile(name, config.max_num_inference_steps)
    preparation = Preparation(pipeline, config.prompt_cache_mib * 2**20)
    runner = StepRunner(pipeline, config.threads)
    runner.cost = cost = warm_up(pipeline, preparation, runner, profile)
    return _Ready(pipeline, preparation.prepare, preparation, runner, profile, cost, config.max_num_seqs)


def _warm_up_calls(pipeline: WholeCallPipeline, name: str, config: WorkerConfig) -> _Ready:
    proven = prove(pipeline, name, config.max_num_inference_steps, config.max_num_seqs)
    runner = RequestRunner(pipeline, proven.profile, proven.together, config.threads)
    max_num_seqs = config.max_num_seqs if proven.together else 1
    log.info("request mode: the whole pipeline is called", model=name, pipeline=pipeline.name, requests=max_num_seqs)
    prepare = one_by_one(pipeline.prepare_encode)
    return _Ready(pipeline, prepare, None, runner, proven.profile, proven.cost, max_num_seqs)
