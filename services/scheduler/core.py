"""The scheduler's decisions: events in, messages out.

Role: `SchedulerCore`, the one door of a pure state machine. Events are the wire messages addressed to the scheduler,
and `Tick`; the only command is `Send`. It reads no clock (time comes in as `now`), opens no socket, draws no random
number and holds no tensor. It knows who is known and which part an event concerns; what follows from it is decided in
those parts: `admission`, `reconcile`, `adoption`, `planning`, `assignment`.
"""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from common import messages as m
from common.errors import ErrorInfo
from services.scheduler import admission, invariants, reconcile
from services.scheduler.adoption import Adoption
from services.scheduler.assignment import Assignment
from services.scheduler.book import RequestBook, Send
from services.scheduler.finished import FinishedRequests
from services.scheduler.gateways import Gateway
from services.scheduler.liveness import Watch
from services.scheduler.planning import Planner, settle, settle_idle
from services.scheduler.policy import POLICIES, Policy
from services.scheduler.workers import Fleet, Worker

__all__ = ["Event", "SchedulerCore", "Send", "Tick"]

RESEND_AFTER_S = 1.0  # a plan that was not received for so long is taken for lost


class Tick(Struct, frozen=True):
    """Time has passed."""


Event = m.ToScheduler | Tick


class SchedulerCore:
    """All scheduler state and every decision about it."""

    def __init__(
        self,
        boot_id: str,
        *,
        policy: str | Policy = "fifo",
        max_queue: int = 1_000,
        suspect_after_s: float = 2.0,
        lost_after_s: float = 5.0,
        max_attempts: int = 3,
        reconcile_s: float = 5.0,
        lease_steps: int = 1,
        update_interval_s: float = 0.1,
        finished_for_s: float = 60.0,  # a gateway that is not silent asks again within seconds
        max_finished: int = 10_000,
    ) -> None:
        self.boot_id = boot_id
        self.homogeneous = policy == "fifo"  # whether the policy promises one key a group
        self._suspect_after_s = suspect_after_s
        self._lost_after_s = lost_after_s
        # For so long from the first gateway's hello on, workers may yet have to say that they are there.
        self._reconcile_s = reconcile_s
        self._reconciling = reconcile_s > 0
        self._reconciled_at: float | None = None  # when that is over; None before the first gateway, and afterwards
        self._outbox: list[Send] = []
        self._numbers = 0  # of peers, in the order in which they became known
        self.fleet = Fleet()
        self.gateways: dict[str, Gateway] = {}
        self.book = RequestBook(
            self._outbox,
            max_queue=max_queue,
            max_attempts=max_attempts,
            reconcile_s=reconcile_s,
            update_interval_s=update_interval_s,
            finished=FinishedRequests(finished_for_s, max_finished),
        )
        planner = Planner(boot_id, POLICIES[policy] if isinstance(policy, str) else policy, lease_steps)
        self._assignment = Assignment(self.book, self.fleet, planner, self._send)
        self._adoption = Adoption(self.book, self.fleet, self._assignment)
        self._worker_watch: Watch[Worker] = Watch()
        self._gateway_watch: Watch[Gateway] = Watch()
        self._models_told: tuple[m.ModelStatus, ...] = ()
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            Tick: self._on_tick,
            m.GatewayHello: self._on_gateway_hello,
            m.GatewayHeartbeat: self._on_gateway_heartbeat,
            m.SubmitRequests: self._on_submit,
            m.AbortRequest: self._on_abort,
            m.WorkerHello: self._on_worker_hello,
            m.RequestReady: self._on_request_ready,
            m.StepResult: self._on_step_result,
            m.RequestDone: self._on_request_done,
            m.WorkerHeartbeat: self._on_worker_heartbeat,
            m.WorkerDraining: self._on_worker_draining,
        }

    def handle(self, event: Event, now: float) -> list[Send]:
        """Takes one event and returns what is to be sent, in order.

        Raises `InvalidTransition` if an event and the state contradict each other; what was to be sent until then
        comes with the next event's messages.
        """
        self._handlers[type(event)](event, now)
        self._assignment.follow_up(now)
        sends = self._outbox.copy()
        self._outbox.clear()
        return sends

    def next_deadline(self) -> float | None:
        """When to send a `Tick` at the latest, if no event comes before."""
        deadlines = (
            self._worker_watch.next_deadline(),
            self._gateway_watch.next_deadline(),
            self._adoption.next_deadline(),
            self._reconciled_at,
        )
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def validate(self) -> None:
        """Asserts the invariants of the whole state. For tests: it looks at everything."""
        invariants.check(self.book, self.fleet, self._adoption.holders, self.homogeneous)

    # ---------------------------------------------------------------------------------------------- from gateways

    def _on_gateway_hello(self, hello: m.GatewayHello, now: float) -> None:
        if not self._speaks_our_protocol(hello.gateway_id, hello.protocol_version):
            return
        if hello.scheduler_boot_id != self.boot_id:
            self._welcome(hello.gateway_id)
            if hello.scheduler_boot_id:
                return
        gateway = self.gateways.get(hello.gateway_id)
        if gateway is None:
            gateway = Gateway(hello.gateway_id, self._next_number(), self._lost_after_s, now)
            self.gateways[hello.gateway_id] = gateway
            self._gateway_watch.add(gateway)
            if self._reconciling and self._reconciled_at is None:
                self._reconciled_at = now + self._reconcile_s
        gateway.last_seen = now
        self._send(hello.gateway_id, m.ModelsUpdate(self.boot_id, self._models_told))

    def _on_gateway_heartbeat(self, heartbeat: m.GatewayHeartbeat, now: float) -> None:
        self._known_gateway(heartbeat.gateway_id, now, heartbeat.scheduler_boot_id)

    def _on_submit(self, submit: m.SubmitRequests, now: float) -> None:
        if self._known_gateway(submit.gateway_id, now):
            self.book.finished.forget(now)
            on_workers = self._adoption.holders
            answers = admission.submit(self.book, self.fleet, submit, on_workers, self._reconciling, now)
            self._outbox += [Send(submit.gateway_id, answer) for answer in answers]
            for request in submit.requests:
                self._adoption.submitted(request.request_id, now)
                self._assignment.look_at(request.model)

    def _on_abort(self, abort: m.AbortRequest, now: float) -> None:
        if self._known_gateway(abort.gateway_id, now):
            for request_id in abort.request_ids:
                request = self.book.live.get(request_id)
                if request is not None and request.gateway_id == abort.gateway_id:
                    self._assignment.abort(request, now, f"aborted by {abort.gateway_id}: {abort.reason}")

    def _known_gateway(self, gateway_id: str, now: float, boot_id: str | None = None) -> bool:
        gateway = self.gateways.get(gateway_id)
        if gateway is None or (boot_id is not None and boot_id != self.boot_id):
            self._welcome(gateway_id)
            return False
        gateway.last_seen = now
        return True

    # ---------------------------------------------------------------------------------------------- from workers

    def _on_worker_hello(self, hello: m.WorkerHello, now: float) -> None:
        if not self._speaks_our_protocol(hello.worker_id, hello.protocol_version):
            return
        if self.fleet.conflicting_profile(hello):
            text = f"another worker serves {hello.profile.model!r} with another profile"
            self._send(hello.worker_id, m.Refused(self.boot_id, ErrorInfo("invalid_request", text)))
            return
        if hello.scheduler_boot_id != self.boot_id:
            self._welcome(hello.worker_id)
            if hello.scheduler_boot_id:
                return
        worker = self.fleet.workers.get(hello.worker_id)
        if worker is not None and worker.hello.profile != hello.profile:
            self._lose(worker, now, f"{hello.worker_id} changed its profile", died=False)
            worker = None
        if worker is None:
            number = self._next_number()
            worker = Worker(hello, number, self._suspect_after_s, self._lost_after_s, last_seen=now)
            worker.claims_until = now + self._reconcile_s
            self.fleet.add(worker)
            self.book.pardon(worker.worker_id)
            if len(self.fleet.models[worker.model].workers) == 1:
                admission.weigh(self.book, self.fleet, worker.model)
            self._worker_watch.add(worker)
        self._seen(worker, now)
        worker.hello = hello
        worker.outstanding.clear()
        worker.changed = worker.resend = True  # the plan in answer is the sign that the hello was accepted
        last_step_id = hello.last_step_id if hello.scheduler_boot_id == self.boot_id else 0
        self._reconcile(worker, hello.residents, last_step_id, now)
        self._adoption.arrived(worker, now)
        self._models_changed()

    def _on_request_ready(self, ready: m.RequestReady, now: float) -> None:
        worker = self._known_worker(ready.worker_id, now)
        if worker is None:
            return
        worker.confirm(ready.last_step_id)
        residency = worker.holds(ready.request_id, ready.attempt)
        if residency is not None and residency.request.status == "preparing":
            reconcile.prepared(self.book, worker, residency, ready.step_index, ready.total_steps, now)
            self._assignment.passed_a_point(residency.request)
            self._assignment.touch(worker)

    def _on_step_result(self, result: m.StepResult, now: float) -> None:
        worker = self._known_worker(result.worker_id, now, result.scheduler_boot_id)
        if worker is None:
            return
        worker.confirm(max(result.last_step_id, result.step_id))
        settle(worker, result.step_id, result.plan_done, result.last_step_id)
        for progress in result.progress:
            residency = worker.holds(progress.request_id, progress.attempt)
            if residency is not None:
                reconcile.progressed(self.book, worker, residency, progress.step_index, now)
                self._assignment.passed_a_point(residency.request)
        for failure in result.failed:
            residency = worker.holds(failure.request_id, failure.attempt)
            if residency is not None:
                self._assignment.fail(worker, residency, now, failure.error)
        for request_id in result.skipped:
            residency = worker.residents.get(request_id)
            # An id alone does not say which attempt; a plan older than this attempt can't have meant it.
            if residency is None or not 0 < residency.first_step_id <= result.step_id:
                continue
            if residency.request.status in ("running", "preempted"):
                self._assignment.requeue(
                    worker, residency, now, f"skipped by {worker.worker_id} in plan {result.step_id}"
                )
        self._assignment.touch(worker)

    def _on_request_done(self, done: m.RequestDone, now: float) -> None:
        worker = self._known_worker(done.worker_id, now)
        if worker is None:
            return
        residency = worker.holds(done.request_id, done.attempt)
        if residency is None:
            self._adoption.done(worker, done, now)
        elif done.outcome == "completed":
            self._assignment.complete(worker, residency, now)
        else:
            self._assignment.fail(
                worker, residency, now, done.error or ErrorInfo("internal", "the worker gave no reason")
            )

    def _on_worker_heartbeat(self, heartbeat: m.WorkerHeartbeat, now: float) -> None:
        worker = self._known_worker(heartbeat.worker_id, now, heartbeat.scheduler_boot_id)
        if worker is None:
            return
        if heartbeat.idle:
            settle_idle(worker, heartbeat.last_step_id)
        if heartbeat.last_step_id < worker.newest_step_id and now - worker.newest_sent_at > RESEND_AFTER_S:
            worker.resend = True
            if heartbeat.idle:
                worker.outstanding.clear()
        self._reconcile(worker, heartbeat.residents, heartbeat.last_step_id, now)

    def _on_worker_draining(self, draining: m.WorkerDraining, now: float) -> None:
        worker = self._known_worker(draining.worker_id, now, draining.scheduler_boot_id)
        if worker is None:
            return
        if draining.leaving:
            self._lose(worker, now, f"{worker.worker_id} is leaving: {draining.reason}", died=draining.failed)
            self._models_changed()
        elif not worker.draining:
            worker.draining = True
            self.fleet.refresh(worker)
            self._models_changed()

    def _known_worker(self, worker_id: str, now: float, boot_id: str | None = None) -> Worker | None:
        worker = self.fleet.workers.get(worker_id)
        if worker is None or (boot_id is not None and boot_id != self.boot_id):
            self._welcome(worker_id)
            return None
        self._seen(worker, now)
        return worker

    def _seen(self, worker: Worker, now: float) -> None:
        worker.last_seen = now
        if worker.suspect:
            worker.suspect = False
            self._worker_watch.add(worker)
            self._assignment.free(worker)

    # ---------------------------------------------------------------------------------------------- time

    def _on_tick(self, _: Tick, now: float) -> None:
        self.book.finished.forget(now)
        self._adoption.tick(now)
        if self._reconciled_at is not None and self._reconciled_at <= now:
            self._reconciled_at, self._reconciling = None, False
            admission.refuse_unknown_models(self.book, self.fleet, now)
        for worker in self._worker_watch.take_due(now):
            if self.fleet.workers.get(worker.worker_id) is not worker:
                continue
            if not worker.suspect:
                worker.suspect = True
                self.fleet.refresh(worker)
            if worker.silent_from() <= now:
                silence_s = now - worker.last_seen
                self._lose(worker, now, f"{worker.worker_id} was silent for {silence_s:.1f} s", died=True)
                self._models_changed()
            else:
                self._worker_watch.add(worker)
        for gateway in self._gateway_watch.take_due(now):
            del self.gateways[gateway.gateway_id]
            for request in [r for r in self.book.live.values() if r.gateway_id == gateway.gateway_id]:
                self._assignment.abort(
                    request, now, f"{gateway.gateway_id} was silent for {now - gateway.last_seen:.1f} s"
                )

    # ---------------------------------------------------------------------------------------------- shared

    def _reconcile(self, worker: Worker, residents: tuple[m.Resident, ...], last_step_id: int, now: float) -> None:
        differences = reconcile.residents(self.book, worker, residents, last_step_id, now)
        for residency in differences.missing:
            self._assignment.requeue(worker, residency, now, f"not on {worker.worker_id} any more")
        if differences.strangers or worker.unclaimed:
            self._adoption.heard(worker, differences.strangers, now)
        self._assignment.touch(worker)
        self._assignment.free(worker)

    def _lose(self, worker: Worker, now: float, cause: str, *, died: bool) -> None:
        self._adoption.gone(worker)
        self._assignment.lose(worker, now, cause, died=died)

    def _models_changed(self) -> None:
        models = self.fleet.status()
        if models != self._models_told:
            self._models_told = models
            for gateway_id in self.gateways:
                self._send(gateway_id, m.ModelsUpdate(self.boot_id, models))

    def _speaks_our_protocol(self, peer_id: str, version: int) -> bool:
        if version == m.PROTOCOL_VERSION:
            return True
        text = f"this scheduler speaks protocol {m.PROTOCOL_VERSION}, not {version}"
        self._send(peer_id, m.Refused(self.boot_id, ErrorInfo("protocol_mismatch", text)))
        return False

    def _welcome(self, peer_id: str) -> None:
        self._send(peer_id, m.Welcome(self.boot_id))

    def _send(self, to: str, message: m.FromScheduler) -> None:
        self._outbox.append(Send(to, message))

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers
