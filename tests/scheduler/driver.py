"""Drives a core event by event, for tests of the form "these events, then exactly these messages"."""

from typing import Any

from common import messages as m
from common.params import DiffusionRequest
from services.scheduler.core import Event, SchedulerCore, Send, Tick
from services.scheduler.workers import Worker
from tests import builders

BOOT = "scheduler-boot"
GATEWAY = builders.GATEWAY
WORKER = builders.WORKER


class Driver:
    """A core, a clock, and shorthands for what peers say. The invariants are checked after every event."""

    def __init__(self, **core: Any) -> None:
        self.core = SchedulerCore(BOOT, **{"update_interval_s": 0.1, "reconcile_s": 0.0} | core)
        self.now = 0.0

    def handle(self, event: Event) -> list[Send]:
        sends = self.core.handle(event, self.now)
        self.core.validate()
        return sends

    def tick(self, seconds: float) -> list[Send]:
        """Time passes in small pieces, as the shell lets it."""
        sends: list[Send] = []
        end = self.now + seconds
        while (deadline := self.core.next_deadline()) is not None and deadline <= end:
            self.now = max(deadline, self.now)
            sends += self.handle(Tick())
        self.now = end
        return sends

    # Gateways

    def gateway(self, gateway_id: str = GATEWAY) -> list[Send]:
        return self.handle(builders.gateway_hello(gateway_id, scheduler_boot_id=BOOT))

    def gateway_beats(self, gateway_id: str = GATEWAY) -> list[Send]:
        return self.handle(m.GatewayHeartbeat(gateway_id, BOOT))

    def submit(self, *requests: DiffusionRequest, gateway_id: str = GATEWAY) -> list[Send]:
        return self.handle(builders.submit(*requests, gateway_id=gateway_id))

    def abort(self, *request_ids: str, gateway_id: str = GATEWAY) -> list[Send]:
        return self.handle(m.AbortRequest(gateway_id, request_ids))

    # Workers

    def worker(self, worker_id: str = WORKER, **changes: Any) -> list[Send]:
        return self.handle(builders.worker_hello(worker_id, **{"scheduler_boot_id": BOOT} | changes))

    def ready(self, request_id: str, worker_id: str = WORKER, attempt: int = 1, **changes: Any) -> list[Send]:
        total = self.core.book.live[request_id].request.params.num_inference_steps
        values = {"step_index": 0, "total_steps": total, "last_step_id": self.newest(worker_id)} | changes
        return self.handle(m.RequestReady(worker_id, request_id, attempt, **values))

    def result(
        self,
        step_id: int,
        progress: dict[str, int] | None = None,
        *,
        done: bool = True,
        last: int | None = None,
        worker_id: str = WORKER,
        attempt: int = 1,
        **changes: Any,
    ) -> list[Send]:
        """A step boundary; the worker has by then received the plans up to `last`, by default all."""
        return self.handle(
            m.StepResult(
                worker_id,
                BOOT,
                step_id,
                progress=tuple(m.Progress(r, attempt, s) for r, s in (progress or {}).items()),
                plan_done=done,
                last_step_id=self.newest(worker_id) if last is None else last,
                **changes,
            )
        )

    def done(self, request_id: str, worker_id: str = WORKER, attempt: int = 1, error: Any = None) -> list[Send]:
        return self.handle(m.RequestDone(worker_id, request_id, attempt, "error" if error else "completed", error))

    def beats(
        self, *residents: m.Resident, worker_id: str = WORKER, last: int | None = None, idle: bool = True
    ) -> list[Send]:
        newest = self.newest(worker_id) if last is None else last
        return self.handle(m.WorkerHeartbeat(worker_id, BOOT, newest, idle, residents=residents))

    # What the core holds

    def known_worker(self, worker_id: str = WORKER) -> Worker:
        return self.core.fleet.workers[worker_id]

    def newest(self, worker_id: str = WORKER) -> int:
        worker = self.core.fleet.workers.get(worker_id)
        return worker.newest_step_id if worker is not None else 0

    def status(self, request_id: str) -> str:
        live = self.core.book.live.get(request_id)
        return live.status if live is not None else self.core.book.finished.get(request_id).status

    def statuses(self) -> dict[str, str]:
        return {request_id: request.status for request_id, request in self.core.book.live.items()}


def to_worker(sends: list[Send], worker_id: str = WORKER) -> list[Any]:
    return [send.message for send in sends if send.to == worker_id]


def to_gateway(sends: list[Send], gateway_id: str = GATEWAY) -> list[Any]:
    return [send.message for send in sends if send.to == gateway_id]


def plans(sends: list[Send], worker_id: str = WORKER) -> list[m.StepPlan]:
    return [message for message in to_worker(sends, worker_id) if isinstance(message, m.StepPlan)]


def members(plan: m.StepPlan) -> dict[str, int]:
    """The until_step of each member of a plan."""
    return {planned.request_id: planned.until_step for group in plan.groups for planned in group.requests}


def updates(sends: list[Send], gateway_id: str = GATEWAY) -> list[tuple[str, str]]:
    """The request id and status of each update."""
    return [(x.request_id, x.status) for x in to_gateway(sends, gateway_id) if isinstance(x, m.RequestUpdate)]


def resident(
    request_id: str, phase: m.ResidentPhase = "denoising", step: int = 0, total: int = 4, attempt: int = 1
) -> m.Resident:
    return m.Resident(request_id, attempt, phase, step, total if phase != "preparing" else 0)


def serving(**core: Any) -> Driver:
    """A core with a gateway and a worker, for up to 4 requests in a step and 8 residents."""
    driver = Driver(**core)
    driver.gateway()
    driver.worker()
    return driver


def running(*requests: DiffusionRequest, **core: Any) -> Driver:
    """Such a core whose worker has all of `requests` ready, in order."""
    driver = serving(**core)
    driver.submit(*requests)
    for request in requests:
        driver.ready(request.request_id)
    return driver
