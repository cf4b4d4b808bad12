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
# How a request can't end that an earlier scheduler has accepted.
REFUSALS = ("queue_full", "no_worker", "model_not_found", "invalid_request")


@dataclass
class ModelGateway:
    """A gateway by the contract. It submits again what it has not heard the end of."""

    gateway_id: str
    boot_id: str = ""
    stopped: bool = False
    calls: list[tuple[DiffusionRequest, ...]] = field(default_factory=list)
    terminals: dict[str, str] = field(default_factory=dict)  # request id -> how it ended, the first word on it
    updates: dict[str, m.RequestUpdate] = field(default_factory=dict)  # the newest of each that has not ended
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
                heard = (self.updates[r.request_id] for r in pending if r.request_id in self.updates)
                claims = tuple(
                    m.RequestClaim(u.request_id, u.worker_id, u.attempt, u.step_index, u.died_on) for u in heard
                )
                self.out.append(m.SubmitRequests(self.gateway_id, pending, claims))

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
                self.updates[message.request_id] = message
        else:
            assert isinstance(message, m.ModelsUpdate)

    def take_picture(self, request_id: str) -> None:
        self.terminals.setdefault(request_id, "image")


Peer = ModelWorker | ModelGateway


class World:
    """A core, peers, and a channel each way between them."""

    def __init__(self, **core: Any) -> None:
        self._core_options = core
        self._epochs = 1
        self._accepted_before: set[str] = set()  # requests that gateways know to be accepted by an earlier scheduler
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

    def restart_scheduler(self) -> None:
        """SIGKILL, and another process in its place: what was under way to it and from it is lost."""
        self._epochs += 1
        self.core = SchedulerCore(f"{BOOT}-{self._epochs}", **self._core_options)
        for channel in (*self.up.values(), *self.down.values()):
            channel.clear()
        for gateway in self.gateways.values():
            gateway.out.clear()
            self._accepted_before.update(gateway.updates)

    def known_to_run(self) -> dict[str, tuple[int, int]]:
        """Attempt and step of each request that is on a worker which lives, as its gateway knows, which lives too."""
        known = {}
        for request_id, request in self.core.book.live.items():
            gateway, worker = self.gateways[request.gateway_id], self.workers.get(request.worker_id)
            if worker is None or worker.stopped or gateway.stopped or request_id in gateway.terminals:
                continue
            update, held = gateway.updates.get(request_id), worker.held.get(request_id)
            if update is None or update.worker_id != worker.worker_id or held is None or held.released:
                continue
            if held.attempt == request.attempt == update.attempt:
                known[request_id] = (held.attempt, held.step_index)
        return known

    def check_goes_on(self, known: dict[str, tuple[int, int]]) -> None:
        """Each of these has ended, or is on a worker no less far than it was."""
        for request_id, before in known.items():
            ended = self.gateways[self.requests[request_id].home.gateway_id].terminals
            if request_id in ended or request_id in self.core.book.finished:
                continue
            request = self.core.book.live[request_id]
            assert request.status != "waiting", f"was at {before}\n{request.tell()}"
            held = self.workers[request.worker_id].held[request_id]
            assert held.attempt == request.attempt
            now = (held.attempt, held.step_index)
            assert now >= before, f"was at {before}, is at {now}\n{request.tell()}"

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

    def double(self, peer_id: str) -> None:
        """What is under way to and from a peer comes twice."""
        for channel in (self.up[peer_id], self.down[peer_id]):
            channel.extend(list(channel))

    def handle(self, event: Any) -> None:
        sends = self.core.handle(event, self.now)
        self.core.validate()
        for send in sends:
            if isinstance(send.message, m.StepPlan):
                self._check_plan(send.to, send.message)
            elif isinstance(send.message, m.RequestUpdate) and send.message.error is not None:
                refused = send.message.error.code in REFUSALS
                assert not (refused and send.message.request_id in self._accepted_before), "accepted, then lost"
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
