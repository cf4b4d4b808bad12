"""The scheduler process: one socket, one clock, one core.

Role: feeds each message that comes in to `SchedulerCore`, sends what comes back, and tells the core the time. It owns
the socket, the clock and the log lines; it decides nothing.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import structlog
import zmq.asyncio

from common import codec, transport
from common import messages as m
from common.config import HEARTBEAT_S, RECONCILE_S, SchedulerConfig, new_peer_id
from common.errors import ConfigError, ProtocolError
from common.metrics import exposed, new_registry
from services.scheduler.book import Send
from services.scheduler.core import Event, SchedulerCore, Tick
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.policy import POLICIES

OVERSLEPT_S = 1.0  # a timer that is late by more than this means that the process itself did not run
MESSAGES_A_TURN = 64  # after so many in a row, timers get their turn

log = structlog.get_logger()


async def serve_scheduler(config: SchedulerConfig, on_bound: Callable[[str], None] = lambda endpoint: None) -> None:
    """Runs the scheduler until it is cancelled; `on_bound` is told the address that it listens on.

    Raises `ConfigError` if the address can't be bound or the policy is unknown.
    """
    if config.policy not in POLICIES:
        raise ConfigError(f"unknown policy {config.policy!r}; known are: {', '.join(sorted(POLICIES))}")
    core = SchedulerCore(
        new_peer_id("scheduler"),
        policy=config.policy,
        max_queue=config.max_queue,
        suspect_after_s=config.suspect_after_s,
        lost_after_s=config.lost_after_s,
        max_attempts=config.max_attempts,
        reconcile_s=RECONCILE_S,
    )
    registry = new_registry()
    metrics = SchedulerMetrics(registry)
    context = zmq.asyncio.Context()
    try:
        link = transport.router(context, config.bind, codec.to_scheduler, _log_malformed)
        try:
            shell = SchedulerShell(core, link, metrics)
            metrics.watch(core, shell.counts, link, asyncio.get_running_loop())
            async with exposed(registry, config.metrics_host, config.metrics_port), asyncio.TaskGroup() as tasks:
                log.info("scheduler listens", endpoint=link.endpoint, boot_id=core.boot_id, policy=config.policy)
                on_bound(link.endpoint)
                tasks.create_task(shell.receive())
                tasks.create_task(shell.keep_time())
        finally:
            link.close()
    finally:
        context.term()


class SchedulerShell:
    """Carries messages between one socket and one core."""

    def __init__(
        self, core: SchedulerCore, link: transport.Link[m.ToScheduler], metrics: SchedulerMetrics | None = None
    ) -> None:
        self._core = core
        self._link = link
        self._metrics = metrics or SchedulerMetrics(new_registry())
        self.counts: Counter[str] = Counter()  # by what happened: messages dropped, sends that failed, errors

    async def receive(self) -> None:
        """Handles messages, for ever."""
        handled = 0
        while True:
            received = await self._link.receive()
            claimed = _sender_id(received.message)
            if claimed != received.sender:
                self.counts["wrong_sender"] += 1
                log.warning("message in another's name dropped", sender=received.sender, claimed=claimed)
                continue
            self.handle(received.message)
            handled += 1
            if handled % MESSAGES_A_TURN == 0:
                # A socket that always has something to read never suspends this loop.
                await asyncio.sleep(0)

    async def keep_time(self) -> None:
        """Ticks at the core's deadlines, for ever."""
        while True:
            now = time.monotonic()
            deadline = self._core.next_deadline()
            # A deadline may be set while this sleeps, so it looks again after a heartbeat at the latest.
            wake_at = now + HEARTBEAT_S if deadline is None else min(max(deadline, now), now + HEARTBEAT_S)
            await asyncio.sleep(wake_at - now)
            if time.monotonic() - wake_at > OVERSLEPT_S:
                # This process was stopped or starved: what peers said meanwhile is still unread, and counts.
                log.warning("scheduler overslept", seconds=round(time.monotonic() - wake_at, 3))
                await asyncio.sleep(HEARTBEAT_S)
            deadline = self._core.next_deadline()
            if deadline is not None and deadline <= time.monotonic():
                self.handle(Tick())

    def handle(self, event: Event) -> None:
        """Has the core handle one event and sends what it answers."""
        now = time.monotonic()
        places = _places(self._core, event)
        try:
            sends = self._core.handle(event, now)
        except Exception:  # one event that the core can't digest must not end the service of all other requests
            self.counts["core_error"] += 1
            log.exception("event not handled", event_type=type(event).__name__, **_identity(event))
            return
        self._metrics.handled(self._core, event, sends, now)
        _log_news(self._core, event, sends, places)
        for send in sends:
            outcome = self._link.send(send.message, to=send.to)
            if outcome is not transport.SendOutcome.SENT:
                # A fact about the peer. Its silence, or its next heartbeat, puts right what it missed.
                self.counts[f"send_{outcome.value}"] += 1
                log.debug("not sent", to=send.to, message_type=type(send.message).__name__, outcome=outcome.value)


class _Place(NamedTuple):
    """Where a request was, and how far."""

    worker_id: str
    step_index: int


def _places(core: SchedulerCore, event: Event) -> dict[str, _Place]:
    """Of the requests that `event` may send back to the queue, by request id: the update that says so knows neither
    any more."""
    match event:
        case Tick():
            workers = list(core.fleet.workers.values())
        case m.WorkerHello() | m.WorkerHeartbeat() | m.WorkerDraining() | m.StepResult(skipped=[_, *_]):
            workers = [core.fleet.workers[event.worker_id]] if event.worker_id in core.fleet.workers else []
        case _:
            workers = []
    return {
        request_id: _Place(worker.worker_id, residency.request.step_index)
        for worker in workers
        for request_id, residency in worker.residents.items()
    }


def _log_news(core: SchedulerCore, event: Event, sends: list[Send], places: dict[str, _Place]) -> None:
    """One line for what an operator wants to know: workers that come and go, requests that were moved or failed."""
    match event:
        case m.WorkerHello():
            log.info("worker says hello", worker_id=event.worker_id, model=event.profile.model, device=event.device)
        case m.WorkerDraining():
            log.info("worker drains", worker_id=event.worker_id, leaving=event.leaving, reason=event.reason)
        case _:
            pass
    for message in (send.message for send in sends):
        match message:
            case m.RequestUpdate(status="waiting", worker_id="") if message.attempt > 0:
                request = core.book.live.get(message.request_id)
                place = places.get(message.request_id, _Place("", 0))
                log.warning(
                    "to be dispatched again",
                    request_id=message.request_id,
                    attempt=message.attempt,
                    worker_id=place.worker_id,
                    step=place.step_index,
                    reason=request.story[-1].cause if request is not None and request.story else "submitted again",
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


def _sender_id(message: m.ToScheduler) -> str:
    match message:
        case m.GatewayHello() | m.GatewayHeartbeat() | m.SubmitRequests() | m.AbortRequest():
            return message.gateway_id
        case _:
            return message.worker_id


def _identity(event: Event) -> dict[str, object]:
    """What of an event may be logged: never a prompt."""
    names = ("worker_id", "gateway_id", "request_id", "attempt", "step_id", "last_step_id")
    return {name: getattr(event, name) for name in names if hasattr(event, name)}


def _log_malformed(sender: str, error: ProtocolError) -> None:
    log.warning("malformed message dropped", sender=sender, error=str(error))
