"""What the scheduler's log tells an operator: peers that come and go, requests that are moved or fail.

Role: events and the core's answers to log lines. It changes nothing, and never names a prompt.
"""

from typing import NamedTuple

import structlog

from common import messages as m
from services.scheduler.book import Send
from services.scheduler.core import Event, SchedulerCore, Tick

log = structlog.get_logger()


class Place(NamedTuple):
    """Where a request was, and how far."""

    worker_id: str
    step_index: int


def places(core: SchedulerCore, event: Event) -> dict[str, Place]:
    """Of the requests that `event` may send back to the queue, by request id. Ask before the core handles it: the
    update that says so knows neither any more."""
    match event:
        case Tick():
            workers = list(core.fleet.workers.values())
        case m.WorkerHello() | m.WorkerHeartbeat() | m.WorkerDraining() | m.StepResult(skipped=[_, *_]):
            workers = [core.fleet.workers[event.worker_id]] if event.worker_id in core.fleet.workers else []
        case _:
            workers = []
    return {
        request_id: Place(worker.worker_id, residency.request.step_index)
        for worker in workers
        for request_id, residency in worker.residents.items()
    }


class News:
    """Tells of one event after another what came of it."""

    def __init__(self) -> None:
        self._workers: set[str] = set()
        self._gateways: set[str] = set()

    def tell(self, core: SchedulerCore, event: Event, sends: list[Send], before: dict[str, Place]) -> None:
        """`before` is what `places` said before the core handled the event."""
        if isinstance(event, Tick | m.WorkerHello | m.WorkerDraining | m.GatewayHello):
            self._tell_of_peers(core, event, sends)
        for message in (send.message for send in sends):
            _tell_of_message(core, event, message, before)

    def _tell_of_peers(self, core: SchedulerCore, event: Event, sends: list[Send]) -> None:
        for worker_id in core.fleet.workers.keys() - self._workers:
            hello = core.fleet.workers[worker_id].hello
            log.info("worker joined", worker_id=worker_id, model=hello.profile.model, device=hello.device)
        for worker_id in self._workers - core.fleet.workers.keys():
            if isinstance(event, m.WorkerDraining):
                log.info("worker left", worker_id=worker_id, reason=event.reason)
            else:
                log.warning("worker lost", worker_id=worker_id)
        if isinstance(event, m.WorkerDraining) and not event.leaving:
            log.info("worker drains", worker_id=event.worker_id, reason=event.reason)
        for gateway_id in core.gateways.keys() - self._gateways:
            log.info("gateway joined", gateway_id=gateway_id)
        for gateway_id in self._gateways - core.gateways.keys():
            log.warning("gateway lost", gateway_id=gateway_id, aborted=sum(send.to == gateway_id for send in sends))
        self._workers, self._gateways = set(core.fleet.workers), set(core.gateways)


def _tell_of_message(core: SchedulerCore, event: Event, message: m.FromScheduler, before: dict[str, Place]) -> None:
    match message:
        case m.RequestUpdate(status="waiting", worker_id="") if message.request_id in before:
            place = before[message.request_id]
            log.warning(
                "to be dispatched again",
                request_id=message.request_id,
                attempt=message.attempt,
                worker_id=place.worker_id,
                step=place.step_index,
                reason=_why_it_waits(core, message.request_id),
            )
        case m.RequestUpdate(status="finished_error", error=error) if error is not None:
            log.info(
                "failed or refused",
                request_id=message.request_id,
                attempt=message.attempt,
                worker_id=message.worker_id,
                step=message.step_index,
                code=error.code,
                reason=error.message,
            )
        case m.ModelsUpdate() if not isinstance(event, m.GatewayHello):
            workers = {status.profile.model: status.workers for status in message.models}
            log.info("workers by model", models=workers)
        case m.Refused():
            log.warning("peer refused", code=message.error.code, reason=message.error.message)
        case _:
            pass


def _why_it_waits(core: SchedulerCore, request_id: str) -> str:
    """The cause of its newest way back to the queue; it may be on another worker by now."""
    request = core.book.live.get(request_id)
    causes = [episode.cause for episode in request.story if episode.target == "waiting"] if request is not None else []
    return causes[-1] if causes else ""
