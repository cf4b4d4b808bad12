"""What the scheduler tells Prometheus.

Role: the definitions, and how they are seen from outside the core: in its records, and in the events and messages that
pass the shell. The core knows nothing of it. Each outcome and reason is there at 0 before it happens, since a rate
misses the event with which a series begins.
"""

import asyncio
from collections import Counter as Count
from collections.abc import Iterator, Sequence
from typing import get_args

from prometheus_client import Counter, Histogram
from prometheus_client.registry import CollectorRegistry

from common import messages as m
from common.errors import ErrorCode
from common.metrics import STEP_S, Family, OnScrape, Reading
from common.transport import Link
from services.scheduler.book import Send
from services.scheduler.core import Event, SchedulerCore
from services.scheduler.request import LIVE
from services.scheduler.workers import Worker

FAMILIES = (
    Family(
        "gauge",
        "stepweave_scheduler_live_requests",
        "Live requests; all but the waiting are resident.",
        ("model", "status"),
    ),
    Family("gauge", "stepweave_scheduler_queued_work_seconds", "What one worker would take for all that wait."),
    Family("gauge", "stepweave_scheduler_workers", "Known workers: serving, suspect or draining.", ("model", "state")),
    Family("gauge", "stepweave_scheduler_gateways", "Known gateways."),
    Family("counter", "stepweave_scheduler_malformed_frames_total", "Frames dropped: no message."),
    Family("counter", "stepweave_scheduler_wrong_senders_total", "Messages dropped: sent in another's name."),
    Family("counter", "stepweave_scheduler_unhandled_events_total", "Events that the core failed on; see the log."),
    Family("counter", "stepweave_scheduler_unsent_messages_total", "Messages that ZeroMQ did not take.", ("reason",)),
)

# How an accepted request may end: outcome and code.
ENDS = (("completed", ""), ("aborted", "aborted"), *(("error", code) for code in get_args(ErrorCode)))
# Why one may not be accepted (`admission.py`).
REFUSALS: tuple[ErrorCode, ...] = ("invalid_request", "model_not_found", "no_worker", "queue_full")
WORKER_STATES = ("serving", "suspect", "draining")


class SchedulerMetrics:
    """Counts what passes the shell; `watch` adds what merely is."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        # By worker: the oldest plan that it is not known to have, and when that was sent.
        self._unheard: dict[str, tuple[int, float]] = {}
        self._requests = Counter(
            "stepweave_scheduler_requests_total",
            "Accepted requests that have ended: completed, error (with its code) or aborted.",
            ("outcome", "code"),
            registry=registry,
        )
        self._refusals = Counter(
            "stepweave_scheduler_refusals_total",
            "Requests that were not accepted, by reason.",
            ("code",),
            registry=registry,
        )
        for outcome, code in ENDS:
            self._requests.labels(outcome, code)
        for code in REFUSALS:
            self._refusals.labels(code)
        self._requeues = Counter(
            "stepweave_scheduler_requeues_total",
            "Requests that wait again because their worker was lost or did not hold them.",
            registry=registry,
        )
        self._plans = Counter("stepweave_scheduler_plans_total", "Step plans sent.", registry=registry)
        self._plan_lag = Histogram(
            "stepweave_scheduler_plan_lag_seconds",
            "From sending a plan with work to its worker's first word that it has it, which comes at a step boundary: "
            "about a step is the least. Far more means that plans come late.",
            buckets=STEP_S,
            registry=registry,
        )

    def handled(self, core: SchedulerCore, event: Event, sends: Sequence[Send], now: float) -> None:
        """The core has answered `event` by `sends`."""
        match event:
            case m.StepResult() | m.WorkerHeartbeat() | m.RequestReady():
                self._plan_heard(event.worker_id, event.last_step_id, now)
            case m.WorkerHello():  # the only way in, so what has left is forgotten here
                self._unheard = {name: plan for name, plan in self._unheard.items() if name in core.fleet.workers}
            case _:
                pass
        answers_submission = isinstance(event, m.SubmitRequests)
        for to, message in sends:
            match message:
                case m.StepPlan():
                    self._plans.inc()
                    if message.groups:
                        self._unheard.setdefault(to, (message.step_id, now))
                case m.RequestUpdate(status="waiting", worker_id="") if message.attempt > 0 and not answers_submission:
                    self._requeues.inc()
                case m.RequestUpdate(status="finished_completed" | "finished_error" | "finished_aborted"):
                    code = message.error.code if message.error is not None else ""
                    if not answers_submission:
                        self._requests.labels(message.status.removeprefix("finished_"), code).inc()
                    elif message.request_id not in core.book.finished:  # else it only says again how it ended
                        self._refusals.labels(code).inc()
                case _:
                    pass

    def _plan_heard(self, worker_id: str, last_step_id: int, now: float) -> None:
        plan = self._unheard.get(worker_id)
        if plan is not None and plan[0] <= last_step_id:
            self._plan_lag.observe(now - plan[1])
            del self._unheard[worker_id]

    def watch(
        self,
        core: SchedulerCore,
        counts: Count[str],
        link: Link[m.ToScheduler],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """From now on the core's records, and the shell's `counts`, are read at each scrape."""

        def read() -> Iterator[Reading]:
            # Zeros too, so that a curve comes down to the ground where nobody is left.
            requests: Count[tuple[str, str]] = Count(
                {(model, status): 0 for model in core.fleet.models for status in LIVE}
            )
            requests.update((record.request.model, record.status) for record in core.book.live.values())
            for labels, count in requests.items():
                yield Reading("stepweave_scheduler_live_requests", count, labels)
            states: Count[tuple[str, str]] = Count(
                {(model, state): 0 for model in core.fleet.models for state in WORKER_STATES}
            )
            states.update((worker.model, _state(worker)) for worker in core.fleet.workers.values())
            for labels, count in states.items():
                yield Reading("stepweave_scheduler_workers", count, labels)
            yield Reading("stepweave_scheduler_queued_work_seconds", core.book.queue.work_s)
            yield Reading("stepweave_scheduler_gateways", len(core.gateways))
            yield Reading("stepweave_scheduler_malformed_frames_total", link.malformed)
            yield Reading("stepweave_scheduler_wrong_senders_total", counts["wrong_sender"])
            yield Reading("stepweave_scheduler_unhandled_events_total", counts["core_error"])
            for reason in ("unreachable", "full"):
                yield Reading("stepweave_scheduler_unsent_messages_total", counts[f"send_{reason}"], (reason,))

        self._registry.register(OnScrape(FAMILIES, read, loop))


def _state(worker: Worker) -> str:
    if worker.suspect:
        return "suspect"
    return "draining" if worker.draining else "serving"
