"""Fixtures: one scripted scheduler, one gateway that is ready, and a worker once a request says where to connect."""

from collections.abc import AsyncIterator, Callable

import pytest
import zmq.asyncio

from common.params import DiffusionRequest
from tests.builders import WORKER
from tests.gateway.stack import RunningGateway, ScriptedScheduler, ScriptedWorker, running_gateway


@pytest.fixture
async def zmq_context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def scheduler(zmq_context: zmq.asyncio.Context) -> AsyncIterator[ScriptedScheduler]:
    scheduler = ScriptedScheduler(zmq_context)
    yield scheduler
    await scheduler.close()


@pytest.fixture
async def gateway(scheduler: ScriptedScheduler) -> AsyncIterator[RunningGateway]:
    async with running_gateway(scheduler.address) as gateway:
        await gateway.ready()
        yield gateway


WorkerFactory = Callable[..., ScriptedWorker]


@pytest.fixture
async def connect_worker(zmq_context: zmq.asyncio.Context) -> AsyncIterator[WorkerFactory]:
    """Connects a worker to the data home of a request."""
    workers: list[ScriptedWorker] = []

    def connect(request: DiffusionRequest, worker_id: str = WORKER) -> ScriptedWorker:
        workers.append(ScriptedWorker(zmq_context, request.home.address, worker_id))
        return workers[-1]

    yield connect
    for worker in workers:
        await worker.close()
