"""What a gateway adds to a request's latency.

How. The real gateway has a core to itself. This process is the client, the scheduler and the worker, the latter two
answering at once with a finished picture; a call's latency without the time that they took is what the gateway added,
and still holds the client's own share. One call at a time, with pictures of two sizes.
"""

import asyncio
import os
import time
from collections.abc import Sequence

import zmq
import zmq.asyncio

from bench.budgets.measurement import Percentiles, Row, median_row
from bench.client import Load, check_completed, connected
from bench.report import percentiles
from bench.stack import Processes, free_port, on_cores, split_cores
from bench.workload import Call, Shape, call_seed
from common import codec
from common import messages as m
from common.params import DiffusionRequest
from services.demo.training.progress import steps as progress

BUDGET_S = 0.005
PICTURES = {"12 kB": 12_000, "1.5 MB": 1_500_000}
PNG = b"\x89PNG\r\n\x1a\n"
WORKER_ID = "worker-bench"
EPOCH = "scheduler-bench"
PROFILE = m.ModelProfile(
    model="instant",
    pipeline="none",
    size=m.SizeRule(multiple=8, min_side=16, max_side=1024, max_pixels=1024 * 1024, pixels_per_token=8),
    default_height=64,
    default_width=64,
    default_num_inference_steps=20,
    default_guidance_scale=4.0,
    max_num_inference_steps=200,
)


class GatewayLatency:
    """Several rounds of calls with each picture."""

    name = "gateway"
    budget = "gateway, added to a request's latency: < 5 ms median"

    def __init__(self, calls: int, rounds: int) -> None:
        self._calls = calls
        self._rounds = rounds
        self._measured: dict[str, list[Percentiles]] = {name: [] for name in PICTURES}

    async def run(self) -> None:
        gateway_core, other_cores = split_cores()
        with on_cores(other_cores), Processes() as processes:
            addresses = [f"ipc://{processes.folder}/scheduler", "--data-bind", f"ipc://{processes.folder}/data"]
            port = free_port()
            arguments = ["services.cli", "gateway", "--scheduler", *addresses, "--port", str(port)]
            backend = InstantBackend(addresses[0])
            answering = asyncio.create_task(backend.answer())
            try:
                processes.start("gateway", [*arguments, "--log-level", "warning", "--config", os.devnull], gateway_core)
                url = f"http://127.0.0.1:{port}"
                await processes.until_ready(url)
                async with connected(url, timeout_s=30.0) as load:
                    for _ in progress("gateway", 0, self._rounds):
                        for name, nbytes in PICTURES.items():
                            backend.picture = PNG + os.urandom(nbytes - len(PNG))
                            await self._calls_of(load, backend)  # the first of a size are slower
                            self._measured[name].append(percentiles(await self._calls_of(load, backend)))
            finally:
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)
                backend.close()

    async def _calls_of(self, load: Load, backend: "InstantBackend") -> list[float]:
        """What the gateway added to each of so many calls."""
        added = []
        for number in range(self._calls):
            call = Call(number, 0.0, Shape(64, 64, 20), 4.0, 1, call_seed(0, number), "red apple")
            backend.seconds = 0.0
            result = await load.make(call)
            check_completed([result])
            added.append(result.latency_s - backend.seconds)
        return added

    def row(self) -> Row | None:
        return median_row(self.name, self.budget, BUDGET_S, self._measured, digits=2)


class InstantBackend:
    """A scheduler that accepts everything, and a worker that has every picture ready."""

    def __init__(self, address: str) -> None:
        self.picture = b""
        self.seconds = 0.0  # from reading a submission to the picture's having been sent, summed
        self.acknowledged = 0  # pictures
        self._context = zmq.asyncio.Context()
        self._control = self._context.socket(zmq.ROUTER)
        self._control.setsockopt(zmq.LINGER, 0)
        self._control.bind(address)
        self._data: dict[str, zmq.asyncio.Socket] = {}  # by the gateway's address

    async def answer(self) -> None:
        """Answers the gateway, for ever."""
        while True:
            identity, frame = await self._control.recv_multipart()
            begun = time.perf_counter()
            match codec.to_scheduler.decode(frame):
                case m.GatewayHello(scheduler_boot_id=epoch) if epoch == EPOCH:
                    status = m.ModelStatus(profile=PROFILE, workers=1)
                    await self._tell(identity, m.ModelsUpdate(EPOCH, (status,)))
                case m.GatewayHello():
                    await self._tell(identity, m.Welcome(EPOCH))
                case m.GatewayHeartbeat(scheduler_boot_id=epoch) if epoch != EPOCH:
                    await self._tell(identity, m.Welcome(EPOCH))
                case m.SubmitRequests(requests=requests):
                    await self._draw(identity, requests)
                    self.seconds += time.perf_counter() - begun
                case _:
                    pass

    async def _draw(self, identity: bytes, requests: Sequence[DiffusionRequest]) -> None:
        for request in requests:
            await self._tell(identity, m.RequestUpdate(request.request_id, "waiting"))
            output = m.ImageOutput(
                request_id=request.request_id,
                attempt=1,
                worker_id=WORKER_ID,
                output_format=request.output.output_format,
                width=request.params.width,
                height=request.params.height,
                nbytes=len(self.picture),
                total_steps=request.params.num_inference_steps,
            )
            link = self._data_link(request.home.address)
            await self._read_acknowledgements(link)
            await link.send_multipart([codec.encode(output), self.picture])

    async def _read_acknowledgements(self, link: zmq.asyncio.Socket) -> None:
        """Those of the pictures before. Unread, they fill the queue, and the gateway is then refused what it sends."""
        while await link.poll(0):
            frames = await link.recv_multipart()
            self.acknowledged += isinstance(codec.data_to_worker.decode(frames[0]), m.ImageAck)

    async def _tell(self, identity: bytes, message: m.Message) -> None:
        await self._control.send_multipart([identity, codec.encode(message)])

    def _data_link(self, address: str) -> zmq.asyncio.Socket:
        if address not in self._data:
            link = self._context.socket(zmq.DEALER)
            link.setsockopt(zmq.ROUTING_ID, WORKER_ID.encode())
            link.setsockopt(zmq.LINGER, 0)
            link.connect(address)
            self._data[address] = link
        return self._data[address]

    def close(self) -> None:
        for link in (self._control, *self._data.values()):
            link.close()
        self._context.term()
