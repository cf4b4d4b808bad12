"""The scheduler with real sockets and the real core, on one core: plan and result cycles a second.

How. `stepweave scheduler` has one core to itself. This process, on another, is 16 workers with 8 requests each, whose
steps take no time, and their gateway: each plan is answered by its result at once, so the scheduler is never without
work. If it used less than its core, these workers were the slower side, and its own share is told too.
"""

import asyncio
import os
import time

import psutil
import zmq

from bench.budgets.measurement import Row
from bench.budgets.virtual_worker import GATEWAY_ID, REQUESTS, VirtualWorker, submission
from bench.report import spread
from bench.stack import BenchError, Processes, on_cores, split_cores
from common import codec
from common import messages as m
from common.config import HEARTBEAT_S
from services.demo.training.progress import steps as progress

BUDGET = 4000
WORKERS = 16
SILENCE_MS = 5000  # after which the scheduler is not the slower side but gone
READ_AT_ONCE = 64  # messages of one socket before the next has its turn


class SocketCycles:
    """Several rounds of some seconds."""

    name = "sockets"
    budget = "scheduler with real sockets, 8 requests a plan, on one core: at least 4,000 plan and result cycles/s"

    def __init__(self, seconds: float, rounds: int) -> None:
        self._seconds = seconds
        self._rounds = rounds
        self._rates: list[float] = []
        self._shares: list[float] = []  # of the core, that the scheduler used

    async def run(self) -> None:
        scheduler_core, other_cores = split_cores()
        with on_cores(other_cores), Processes() as processes, zmq.Context() as context:
            address = f"ipc://{processes.folder}/scheduler"
            arguments = ["services.cli", "scheduler", "--bind", address, "--log-level", "warning"]
            child = processes.start("scheduler", [*arguments, "--config", os.devnull], scheduler_core)
            fleet = SocketFleet(context, address)
            try:
                await fleet.set_to_work(processes)
                await fleet.cycles(self._seconds)  # not measured
                process = psutil.Process(child.pid)
                figures: dict[str, float] = {}
                for _ in progress("sockets", 0, self._rounds, figures):
                    before, begun = process.cpu_times(), time.perf_counter()
                    cycles = await fleet.cycles(self._seconds)
                    seconds, after = time.perf_counter() - begun, process.cpu_times()
                    processes.check()
                    self._rates.append(cycles / seconds)
                    self._shares.append((after.user + after.system - before.user - before.system) / seconds)
                    figures.update(cycles_s=self._rates[-1], core=self._shares[-1])
            finally:
                fleet.close()

    def row(self) -> Row | None:
        if not self._rates:
            return None
        rate, share = spread(self._rates), spread(self._shares)
        return Row(
            name=self.name,
            budget=self.budget,
            measured=f"{rate.shown(0)} cycles/s, with {share.shown(2)} of the core",
            met=rate.median >= BUDGET,
            figures={"cycles_s": rate, "core_share": share},
        )


class SocketFleet:
    """Virtual workers and a gateway, each on a socket of its own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._context = context
        self._address = address
        self._poller = zmq.Poller()
        self._gateway = self._dealer(GATEWAY_ID)
        self._workers: dict[zmq.Socket[bytes], VirtualWorker] = {}
        for number in range(WORKERS):
            worker = VirtualWorker(f"worker-{number}")
            self._workers[self._dealer(worker.worker_id)] = worker
        self._epoch = ""
        self._beat_at = 0.0
        self._results = 0
        self._ready = 0  # requests that were prepared

    def _dealer(self, identity: str) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, identity.encode())
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(self._address)
        self._poller.register(dealer, zmq.POLLIN)
        return dealer

    def close(self) -> None:
        for dealer in (self._gateway, *self._workers):
            dealer.close()

    async def set_to_work(self, processes: Processes) -> None:
        """Says hello for everybody and submits 8 requests for each worker; returns when all are prepared."""
        _send(self._gateway, m.GatewayHello(GATEWAY_ID, m.PROTOCOL_VERSION))
        end = time.monotonic() + SILENCE_MS / 1000
        while not self._epoch:
            processes.check()
            if time.monotonic() > end:
                raise BenchError("the scheduler does not answer")
            if self._poller.poll(100):
                message = codec.to_gateway.decode(self._gateway.recv())
                self._epoch = message.scheduler_boot_id if isinstance(message, m.Welcome) else ""
            await asyncio.sleep(0)
        _send(self._gateway, m.GatewayHello(GATEWAY_ID, m.PROTOCOL_VERSION, self._epoch))
        for dealer, worker in self._workers.items():
            _send(dealer, worker.hello(self._epoch))
            # Its answer, a plan, says that the worker is known: only then are there places for its requests.
            if not dealer.poll(SILENCE_MS):
                raise BenchError(f"the scheduler does not answer {worker.worker_id}")
        for number in range(WORKERS):
            _send(self._gateway, submission(number))
        while self._ready < WORKERS * REQUESTS:
            self._turn()
            await asyncio.sleep(0)

    async def cycles(self, seconds: float) -> int:
        """Works for so long; returns how many plans were answered by a result."""
        self._results = 0
        end = time.perf_counter() + seconds
        turns = 0
        while time.perf_counter() < end:
            self._turn()
            turns += 1
            if turns % 64 == 0:
                await asyncio.sleep(0)  # a chance to be interrupted
        return self._results

    def _turn(self) -> None:
        """Reads what there is and answers it."""
        if time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + HEARTBEAT_S
            if self._epoch:
                _send(self._gateway, m.GatewayHeartbeat(GATEWAY_ID, self._epoch))
        readable = self._poller.poll(SILENCE_MS)
        if not readable:
            raise BenchError("the scheduler has gone silent")
        for dealer, _ in readable:
            for frame in _waiting(dealer):
                if dealer is not self._gateway:
                    self._answer(dealer, codec.to_worker.decode(frame))

    def _answer(self, dealer: zmq.Socket[bytes], message: m.ToWorker) -> None:
        if not isinstance(message, m.StepPlan):
            return
        worker = self._workers[dealer]
        for ready in worker.on_plan(message):
            self._ready += 1
            _send(dealer, ready)
        while (result := worker.step()) is not None:
            _send(dealer, result)
            self._results += bool(result.progress)


def _waiting(dealer: zmq.Socket[bytes]) -> list[bytes]:
    """The frames that can be read now."""
    frames: list[bytes] = []
    try:
        while len(frames) < READ_AT_ONCE:
            frames.append(dealer.recv(zmq.NOBLOCK))
    except zmq.Again:
        pass
    return frames


def _send(dealer: zmq.Socket[bytes], message: m.Message) -> None:
    dealer.send(codec.encode(message))
