"""A model of everything around the core: workers, gateways and the channels between, on a virtual clock.

Role: peers that obey the contract of `common.messages` without a tensor or a socket, and a world that carries their
messages to a core and can do to them what networks and machines do. What must hold at every moment is asserted here.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from common import messages as m
from common.errors import ErrorInfo
from common.params import DataHome, DiffusionRequest
from services.scheduler.core import SchedulerCore, Tick
from tests import builders

BOOT = "scheduler-boot"


@dataclass
class Held:
    """One resident of a model worker."""

    request: DiffusionRequest
    attempt: int
    phase: Literal["preparing", "denoising", "decoding"] = "preparing"
    step_index: int = 0
    released: bool = False  # leaves at the next boundary

    @property
    def total_steps(self) -> int:
        return self.request.params.num_inference_steps


@dataclass
class ModelWorker:
    """A worker by the contract: a mailbox with one plan running and one pending, and residents with phases."""

    worker_id: str
    max_num_seqs: int = 2
    max_residents: int = 4
    # Whether its results say which plans it had received when they are sent, not at the boundary that they report.
    late_last_step_id: bool = False
    # Whether an idle worker leaves a new plan in the mailbox for a moment, where a newer one may replace it.
    slow_start: bool = False
    # Whether a plan without groups leaves a pending one in place.
    keeps_pending: bool = False
    # Whether it forgets an attempt that it is through with, so that a plan which still repeats it brings it back.
    forgetful: bool = False
    boot_id: str = ""
    last_step_id: int = 0
    held: dict[str, Held] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)  # newest attempt of each request that it ever held
    current: m.StepPlan | None = None
    pending: m.StepPlan | None = None
    in_step: tuple[str, ...] | None = None  # members of the step that is running
    stopped: bool = False  # SIGSTOP
    draining: bool = False
    out: list[Any] = field(default_factory=list)

    def hello(self) -> None:
        self.out.append(
            builders.worker_hello(
                self.worker_id,
                scheduler_boot_id=self.boot_id,
                max_num_seqs=self.max_num_seqs,
                max_residents=self.max_residents,
                residents=self.residents(),
                last_step_id=self.last_step_id,
            )
        )

    def residents(self) -> tuple[m.Resident, ...]:
        return tuple(
            m.Resident(i, h.attempt, h.phase, h.step_index, 0 if h.phase == "preparing" else h.total_steps)
            for i, h in self.held.items()
        )

    def heartbeat(self) -> None:
        idle = self.current is None and self.pending is None
        self.out.append(
            m.WorkerHeartbeat(self.worker_id, self.boot_id, self.last_step_id, idle, residents=self.residents())
        )

    def drain(self, leaving: bool) -> None:
        self.out.append(m.WorkerDraining(self.worker_id, self.boot_id, leaving, "asked to"))

    def receive(self, message: Any) -> None:
        if isinstance(message, m.Welcome):
            if message.scheduler_boot_id != self.boot_id:
                self.boot_id, self.last_step_id = message.scheduler_boot_id, 0
            self.hello()
        elif isinstance(message, m.StepPlan):
            if message.scheduler_boot_id == self.boot_id and message.step_id > self.last_step_id:
                self._take(message)
        else:
            raise AssertionError(f"unexpected: {message}")

    def _take(self, plan: m.StepPlan) -> None:
        self.last_step_id = plan.step_id
        for released in plan.released:
            held = self.held.get(released.request_id)
            if held is not None and held.attempt == released.attempt:
                if self.in_step is not None and released.request_id in self.in_step:
                    held.released = True
                else:
                    del self.held[released.request_id]
        for new in plan.new:
            request_id = new.request.request_id
            if new.attempt > self.seen.get(request_id, 0) or (self.forgetful and request_id not in self.held):
                self.held[request_id] = Held(new.request, new.attempt)
                self.seen[request_id] = new.attempt
        present = sum(not held.released for held in self.held.values())
        assert self.forgetful or present <= self.max_residents, f"{self.worker_id} is to hold {present}"
        if plan.groups or not self.keeps_pending:
            self.pending = plan if plan.groups else None
        if not self.slow_start:
            self.wake()

    def wake(self) -> None:
        """An idle step thread looks into the mailbox."""
        if self.current is None and self.pending is not None:
            self.current, self.pending = self.pending, None

    def begin_step(self) -> bool:
        """Starts a step of the current plan. False if there is none or one is running."""
        self.wake()
        if self.current is None or self.in_step is not None:
            return False
        members = []
        for group in self.current.groups:
            runnable = [p.request_id for p in group.requests if self._short(p)]
            shapes = {
                (self.held[r].request.params.height, self.held[r].request.params.guidance_scale) for r in runnable
            }
            assert len(shapes) <= 1, f"{self.worker_id} runs {shapes} together"
            members += runnable
        assert len(members) <= self.max_num_seqs, f"{self.worker_id} runs {len(members)}"
        self.in_step = tuple(members)
        return True

    def _short(self, planned: m.PlannedRequest) -> bool:
        held = self.held.get(planned.request_id)
        if held is None or held.attempt != planned.attempt or held.released or held.phase != "denoising":
            return False
        return held.step_index < planned.until_step

    def end_step(self, failing: str | None = None) -> bool:
        """Ends the running step: a boundary. False if none is running."""
        if self.in_step is None:
            return False
        assert self.current is not None
        until = {p.request_id: p for group in self.current.groups for p in group.requests}
        progress, failed = [], []
        for request_id in self.in_step:
            held = self.held[request_id]
            if request_id == failing:
                failed.append(m.Failure(request_id, held.attempt, ErrorInfo("non_finite", "NaN")))
                del self.held[request_id]
                continue
            held.step_index += 1
            assert held.step_index <= min(until[request_id].until_step, held.total_steps)
            progress.append(m.Progress(request_id, held.attempt, held.step_index))
            if held.step_index == held.total_steps:
                held.phase = "decoding"
        self.in_step = None
        for request_id in [r for r, held in self.held.items() if held.released]:
            del self.held[request_id]
        skipped = tuple(r for r, p in until.items() if r not in self.held or self.held[r].attempt != p.attempt)
        done = not any(self._short(p) for p in until.values())
        plan, received = self.current, self.last_step_id
        if self.pending is not None and (done or self.pending.starts == "next_boundary"):
            self.current, self.pending = self.pending, None
        elif done:
            self.current = None
        result = m.StepResult(
            self.worker_id,
            self.boot_id,
            plan.step_id,
            progress=tuple(progress),
            failed=tuple(failed),
            skipped=skipped,
            plan_done=done,
            last_step_id=received,
        )
        self.out.append(result)
        return True

    def flush(self) -> list[Any]:
        """What it sends now."""
        messages, self.out = self.out, []
        if self.late_last_step_id:
            messages = [
                m.StepResult(**{f: getattr(x, f) for f in x.__struct_fields__} | {"last_step_id": self.last_step_id})
                if isinstance(x, m.StepResult) and x.scheduler_boot_id == self.boot_id
                else x
                for x in messages
            ]
        return messages

    def prepare(self, fails: bool = False) -> bool:
        """Prepares the next preparing resident."""
        request_id = next((r for r, held in self.held.items() if held.phase == "preparing"), None)
        if request_id is None:
            return False
        held = self.held[request_id]
        if fails:
            self._done(request_id, "error", ErrorInfo("generation_failed", "no"))
            return True
        held.phase = "denoising"
        self.out.append(
            m.RequestReady(
                self.worker_id, request_id, held.attempt, 0, held.total_steps, last_step_id=self.last_step_id
            )
        )
        return True

    def decode(self) -> str | None:
        """Decodes the next finished resident and delivers its picture; returns its id."""
        request_id = next((r for r, held in self.held.items() if held.phase == "decoding" and not held.released), None)
        if request_id is not None:
            self._done(request_id, "completed", None)
        return request_id

    def _done(self, request_id: str, outcome: Literal["completed", "error"], error: ErrorInfo | None) -> None:
        held = self.held.pop(request_id)
        self.out.append(m.RequestDone(self.worker_id, request_id, held.attempt, outcome, error))


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
