"""A model of everything around the core, on a virtual clock: gateways, workers, and the channels between.

Role: carries messages between the core and its peers, and can do to them what networks and machines do. What must hold
of every plan is asserted here.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common import messages as m
from common.params import DataHome, DiffusionRequest
from services.scheduler.core import SchedulerCore, Tick
from tests import builders
from tests.scheduler.model_worker import ModelWorker

BOOT = "scheduler-boot"


@dataclass
class ModelGateway:
    """A gateway by the contract. It submits again what it has not heard the end of."""

    gateway_id: str
    boot_id: str = ""
    stopped: bool = False
    calls: list[tuple[DiffusionRequest, ...]] = field(default_factory=list)
    terminals: dict[str, str] = field(default_factory=dict)  # request id -> how it ended, the first word on it
    out: list[Any] = field(default_factory=list)

    def hello(self) -> None:
        self.out.append(builders.gateway_hello(self.gateway_id, scheduler_boot_id=self.boot_id))

    def heartbeat(self) -> None:
        self.out.append(m.GatewayHeartbeat(self.gateway_id, self.boot_id))

    def submit(self, requests: tuple[DiffusionRequest, ...]) -> None:
        self.calls.append(requests)
        self.out.append(m.SubmitRequests(self.gateway_id, requests))

    def submit_again(self) -> None:
        for call in self.calls:
            pending = tuple(r for r in call if r.request_id not in self.terminals)
            if pending:
                self.out.append(m.SubmitRequests(self.gateway_id, pending))

    def abort(self, request_id: str) -> None:
        self.out.append(m.AbortRequest(self.gateway_id, (request_id,), "client left"))

    def receive(self, message: Any) -> None:
        if isinstance(message, m.Welcome):
            self.boot_id = message.scheduler_boot_id
            self.hello()
            self.submit_again()
        elif isinstance(message, m.RequestUpdate):
            assert any(r.request_id == message.request_id for call in self.calls for r in call), "not of this gateway"
            if message.status in ("finished_aborted", "finished_error"):
                assert message.error is not None
                self.terminals.setdefault(message.request_id, message.error.code)
        else:
            assert isinstance(message, m.ModelsUpdate)

    def take_picture(self, request_id: str) -> None:
        self.terminals.setdefault(request_id, "image")


Peer = ModelWorker | ModelGateway


class World:
    """A core, peers, and a channel each way between them."""

    def __init__(self, **core: Any) -> None:
        self.core = SchedulerCore(BOOT, **core)
        self.now = 0.0
        self.workers: dict[str, ModelWorker] = {}
        self.gateways: dict[str, ModelGateway] = {}
        self.up: dict[str, deque[Any]] = {}  # to the scheduler, by peer
        self.down: dict[str, deque[Any]] = {}  # from the scheduler
        self.requests: dict[str, DiffusionRequest] = {}
        self.loses: Callable[[], bool] = lambda: False  # whether the next message is lost
        self._spawned = 0

    def peers(self) -> dict[str, Peer]:
        return {**self.workers, **self.gateways}

    def add_worker(self, **options: Any) -> ModelWorker:
        self._spawned += 1
        worker = ModelWorker(f"worker-{self._spawned}", **options)
        self.workers[worker.worker_id] = worker
        self._connect(worker.worker_id)
        worker.hello()
        return worker

    def add_gateway(self) -> ModelGateway:
        gateway = ModelGateway(f"gateway-{len(self.gateways) + 1}")
        self.gateways[gateway.gateway_id] = gateway
        self._connect(gateway.gateway_id)
        gateway.hello()
        return gateway

    def _connect(self, peer_id: str) -> None:
        self.up[peer_id] = deque()
        self.down[peer_id] = deque()

    def kill(self, worker_id: str) -> None:
        """SIGKILL: what it had sent may still arrive."""
        del self.workers[worker_id]
        self.down[worker_id].clear()

    def submit(self, gateway: ModelGateway, count: int, steps: int, **params: Any) -> tuple[DiffusionRequest, ...]:
        home = DataHome(gateway.gateway_id, "tcp://127.0.0.1:1")
        start = len(self.requests)
        requests = tuple(
            builders.request(f"r{start + i}", home=home, num_inference_steps=steps, **params) for i in range(count)
        )
        self.requests |= {r.request_id: r for r in requests}
        gateway.submit(requests)
        return requests

    def decode(self, worker: ModelWorker) -> bool:
        request_id = worker.decode()
        if request_id is not None:
            self.gateways[self.requests[request_id].home.gateway_id].take_picture(request_id)
        return request_id is not None

    def collect(self) -> None:
        """Moves what peers want to say into their channels."""
        for peer_id, peer in self.peers().items():
            messages = peer.flush() if isinstance(peer, ModelWorker) else peer.out
            self.up[peer_id].extend(messages)
            peer.out = []

    def deliver_up(self, peer_id: str) -> bool:
        """One message to the scheduler."""
        self.collect()
        if not self.up[peer_id]:
            return False
        message = self.up[peer_id].popleft()
        if not self.loses():
            self.handle(message)
        return True

    def deliver_down(self, peer_id: str) -> bool:
        """One message from the scheduler."""
        peer = self.peers().get(peer_id)
        if peer is None or peer.stopped or not self.down[peer_id]:
            return False
        message = self.down[peer_id].popleft()
        if not self.loses():
            peer.receive(message)
        return True

    def handle(self, event: Any) -> None:
        sends = self.core.handle(event, self.now)
        self.core.validate()
        for send in sends:
            if isinstance(send.message, m.StepPlan):
                self._check_plan(send.to, send.message)
            if send.to in self.peers():
                self.down[send.to].append(send.message)

    def _check_plan(self, worker_id: str, plan: m.StepPlan) -> None:
        members = [p for group in plan.groups for p in group.requests]
        limits = self.core.fleet.workers[worker_id].limits
        assert len(members) <= limits.max_num_seqs
        for group in plan.groups:
            shapes = {
                (self.requests[p.request_id].params.height, self.requests[p.request_id].params.guidance_scale)
                for p in group.requests
            }
            assert len(shapes) == 1, f"plan {plan.step_id} mixes {shapes}"
        for planned in members:
            assert 0 < planned.until_step <= self.requests[planned.request_id].params.num_inference_steps

    def advance(self, seconds: float) -> None:
        """Time passes; the core's timers go off when they should."""
        end = self.now + seconds
        while (deadline := self.core.next_deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            self.handle(Tick())
        self.now = end

    def deliver_all(self) -> None:
        moved = True
        while moved:
            moved = False
            for peer_id in list(self.up):
                while self.deliver_up(peer_id):
                    moved = True
                while self.deliver_down(peer_id):
                    moved = True

    def round(self, seconds: float = 0.25) -> None:
        """A while in which everything works: all that can be done is done once."""
        for worker in list(self.workers.values()):
            if not worker.stopped:
                while worker.prepare():
                    pass
                worker.end_step()
                worker.begin_step()
                while self.decode(worker):
                    pass
        for peer in self.peers().values():
            if not peer.stopped:
                peer.heartbeat()
        self.deliver_all()
        self.advance(seconds)

    def settle(self, max_rounds: int = 300) -> None:
        """Heals everything and runs until nothing is left to do."""
        for peer in self.peers().values():
            peer.stopped = False
        if not any(not worker.draining for worker in self.workers.values()):
            self.add_worker()
        for number in range(max_rounds):
            if number % 4 == 0:
                for gateway in self.gateways.values():
                    gateway.submit_again()
            self.round()
            if self._is_settled():
                return
        stories = "\n".join(r.tell() for r in self.core.book.live.values())
        raise AssertionError(f"not settled; pending {self._pending()}\n{stories}\n{self.workers}")

    def _pending(self) -> list[str]:
        return [
            r.request_id
            for gateway in self.gateways.values()
            for call in gateway.calls
            for r in call
            if r.request_id not in gateway.terminals
        ]

    def _is_settled(self) -> bool:
        quiet = not self._pending() and not self.core.book.live
        return quiet and not any(worker.held for worker in self.workers.values())
