"""The scheduler process: one socket, one clock, one core.

Role: feeds each message that comes in to `SchedulerCore`, sends what comes back, and tells the core the time. It owns
the socket and the clock; it decides nothing.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import structlog
import zmq.asyncio

from common import codec, transport
from common import messages as m
from common.config import HEARTBEAT_S, RECONCILE_S, SchedulerConfig, new_peer_id
from common.errors import ConfigError, ProtocolError
from common.metrics import exposed, new_registry
from services.scheduler.core import Event, SchedulerCore, Tick
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.news import News, places
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
        self._news = News()
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
        before = places(self._core, event)
        try:
            sends = self._core.handle(event, now)
        except Exception:  # one event that the core can't digest must not end the service of all other requests
            self.counts["core_error"] += 1
            log.exception("event not handled", event_type=type(event).__name__, **_identity(event))
            return
        self._metrics.handled(self._core, event, sends, now)
        self._news.tell(self._core, event, sends, before)
        for send in sends:
            outcome = self._link.send(send.message, to=send.to)
            if outcome is not transport.SendOutcome.SENT:
                # A fact about the peer. Its silence, or its next heartbeat, puts right what it missed.
                self.counts[f"send_{outcome.value}"] += 1
                log.debug("not sent", to=send.to, message_type=type(send.message).__name__, outcome=outcome.value)


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
