"""The scheduler with real sockets and the real core, on one core: plan and result cycles a second.

How. `stepweave scheduler` has one core to itself. This process, on the others, is 16 workers with 8 requests each, and
their gateway. A worker's step takes until the plan after it has come: as with real workers there is always one plan
running and never more than one waiting, each plan has one result with all 8 requests in it, and the scheduler is never
without work. If it used less than its core, these workers, or other programs on the machine, kept it from it: then the
row says so, and how many cycles it makes with a second of CPU time.
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
FULL_SHARE = 0.9  # of its core, from which on the scheduler counts as the slower side
UNTIL_STEADY = 16  # results of each worker, after which it runs all that it holds
SILENCE_MS = 5000  # after which the scheduler is not the slower side but gone
READ_AT_ONCE = 64  # messages of one socket before the next has its turn


class SocketCycles:
    """Several rounds of some seconds."""

    name = "sockets"
    budget = "scheduler with real sockets, 8 requests a plan, on one core: at least 4,000 plan and result cycles/s"

    def __init__(self, seconds: float, rounds: int) -> None:
        self._seconds = seconds
        self._rounds = rounds
        self.rates: list[float] = []
        self.shares: list[float] = []  # of the core, that the scheduler used

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
                    self.rates.append(cycles / seconds)
                    self.shares.append((after.user + after.system - before.user - before.system) / seconds)
                    figures.update(cycles_s=self.rates[-1], core=self.shares[-1])
            finally:
                fleet.close()

    def row(self) -> Row | None:
        if not self.rates:
            return None
        rate, share = spread(self.rates), spread(self.shares)
        cpu_rate = spread([rate / share for rate, share in zip(self.rates, self.shares, strict=True)])
        measured = f"{rate.shown(0)} cycles/s, with {share.shown(2)} of the core"
        full = share.median >= FULL_SHARE
        slower = f"the bench's own workers, or others, were the slower side; {cpu_rate.shown(0)} a second of CPU time"
        return Row(
            name=self.name,
            budget=self.budget,
            measured=measured if full else f"{measured}: {slower}",
            met=True if rate.median >= BUDGET else False if full else None,
            figures={"cycles_s": rate, "core_share": share, "cycles_cpu_s": cpu_rate},
        )


class SocketFleet:
    """Virtual workers and a gateway, each on a socket of its own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._context = context
        self._address = address
        self._poller = zmq.Poller()
        self.gateway = self._dealer(GATEWAY_ID)
        self._workers: dict[zmq.Socket[bytes], VirtualWorker] = {}
        for number in range(WORKERS):
            worker = VirtualWorker(f"worker-{number}")
            self._workers[self._dealer(worker.worker_id)] = worker
        self._epoch = ""
        self._beat_at = 0.0
        self._members = dict.fromkeys(self._workers, 0)  # requests in the newest plan, by the worker's socket
        self._results = dict.fromkeys(self._workers, 0)
        self._plans = 0  # with all 8 requests
        self._at_work = False  # steps are run
        self._steady = False  # every result must have all 8 requests in it

    def _dealer(self, identity: str) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, identity.encode())
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(self._address)
        self._poller.register(dealer, zmq.POLLIN)
        return dealer

    def close(self) -> None:
        for dealer in (self.gateway, *self._workers):
            dealer.close()

    async def set_to_work(self, processes: Processes) -> None:
        """Says hello for everybody and submits 8 requests for each worker; returns when all are in every step."""
        _send(self.gateway, m.GatewayHello(GATEWAY_ID, m.PROTOCOL_VERSION))
        end = time.monotonic() + SILENCE_MS / 1000
        while not self._epoch:
            processes.check()
            if time.monotonic() > end:
                raise BenchError("the scheduler does not answer")
            if self._poller.poll(100):
                message = codec.to_gateway.decode(self.gateway.recv())
                self._epoch = message.scheduler_boot_id if isinstance(message, m.Welcome) else ""
            await asyncio.sleep(0)
        _send(self.gateway, m.GatewayHello(GATEWAY_ID, m.PROTOCOL_VERSION, self._epoch))
        for dealer, worker in self._workers.items():
            _send(dealer, worker.hello(self._epoch))
            # Its answer, a plan, says that the worker is known: only then are there places for its requests.
            if not dealer.poll(SILENCE_MS):
                raise BenchError(f"the scheduler does not answer {worker.worker_id}")
        for number in range(WORKERS):
            _send(self.gateway, submission(number))
        while min(self._members.values()) < REQUESTS:
            self._turn()
            await asyncio.sleep(0)
        self._at_work = True
        for dealer, worker in self._workers.items():
            self._step(dealer, worker)
        while min(self._results.values()) < UNTIL_STEADY:
            self._turn()
            await asyncio.sleep(0)
        self._steady = True

    async def cycles(self, seconds: float) -> int:
        """Works for so long; returns how many plans came and were answered by a result, all 8 requests in both.

        Raises `BenchError` where a result has less, or where plans and results are not as many.
        """
        self._plans = 0
        results = sum(self._results.values())
        end = time.perf_counter() + seconds
        turns = 0
        while time.perf_counter() < end:
            self._turn()
            turns += 1
            if turns % 64 == 0:
                await asyncio.sleep(0)  # a chance to be interrupted
        results = sum(self._results.values()) - results
        if abs(results - self._plans) > WORKERS + 0.1 * results:  # each worker may have one under way
            raise BenchError(f"{self._plans} plans were answered by {results} results: this measures no cycle")
        return min(results, self._plans)

    def _turn(self) -> None:
        """Reads what there is and answers it."""
        if time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + HEARTBEAT_S
            if self._epoch:
                _send(self.gateway, m.GatewayHeartbeat(GATEWAY_ID, self._epoch))
        readable = self._poller.poll(SILENCE_MS)
        if not readable:
            raise BenchError("the scheduler has gone silent")
        for dealer, _ in readable:
            for frame in _waiting(dealer):
                if dealer is not self.gateway:
                    self._answer(dealer, codec.to_worker.decode(frame))

    def _answer(self, dealer: zmq.Socket[bytes], message: m.ToWorker) -> None:
        if not isinstance(message, m.StepPlan):
            return
        worker = self._workers[dealer]
        for ready in worker.on_plan(message):
            _send(dealer, ready)
        self._members[dealer] = sum(len(group.requests) for group in message.groups)
        self._plans += self._members[dealer] == REQUESTS
        if self._at_work:
            self._step(dealer, worker)

    def _step(self, dealer: zmq.Socket[bytes], worker: VirtualWorker) -> None:
        """Ends the running step, and those that follow it until there is again no plan that waits for its turn."""
        while (result := worker.step()) is not None:
            if self._steady and len(result.progress) != REQUESTS:
                raise BenchError(
                    f"a result of {worker.worker_id} has {len(result.progress)} requests, not {REQUESTS}: "
                    "this measures no steady load"
                )
            _send(dealer, result)
            self._results[dealer] += 1
            waits = not result.plan_done and result.last_step_id > result.step_id
            if result.progress and not waits:
                return


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
