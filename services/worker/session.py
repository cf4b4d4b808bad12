"""A worker's talk with the scheduler: hello, heartbeats, plans in, results out.

Role: the control link, and which scheduler epoch and which plan is the newest. What a plan asks for is passed on:
requests to `Residents`, groups to `StepThread`. It lives on the event loop and knows no tensors.
"""

import asyncio
import contextlib
import time
from collections import deque
from typing import Protocol

import structlog
import zmq.asyncio

from common import codec, transport
from common.config import HEARTBEAT_S
from common.errors import ConfigError, ProtocolError
from common.messages import (
    PROTOCOL_VERSION,
    DrainWorker,
    Message,
    ModelProfile,
    Refused,
    RequestDone,
    StepCost,
    StepPlan,
    Welcome,
    WorkerDraining,
    WorkerHeartbeat,
    WorkerHello,
    WorkerLimits,
)
from services.worker.residents import Residents
from services.worker.step_thread import Boundary, StepThread

log = structlog.get_logger()

REMEMBERED_EPOCHS = 16


class Credit(Protocol):
    """What a heartbeat says of the data links; `Delivery` in production."""

    @property
    def stalled(self) -> bool: ...

    def close_unused(self) -> None: ...


class Introduction:
    """What a worker says of itself in each hello."""

    def __init__(
        self,
        worker_id: str,
        profile: ModelProfile,
        cost: StepCost,
        limits: WorkerLimits,
        device: str,
        step_execution: bool = True,
    ) -> None:
        self.worker_id = worker_id
        self.profile = profile
        self.cost = cost
        self.limits = limits
        self.device = device
        self.step_execution = step_execution


class Session:
    """The control link of one worker. `residents` and `steps` are set by its owner before `run`."""

    residents: Residents
    steps: StepThread

    def __init__(
        self,
        context: zmq.asyncio.Context,
        scheduler: str,
        introduction: Introduction,
        credit: Credit,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._me = introduction
        self._address = scheduler
        self._reachable = True  # until a message could not be sent
        self._credit = credit
        self._heartbeat_s = heartbeat_s
        self._link = transport.dealer(context, scheduler, introduction.worker_id, codec.to_worker, self._on_malformed)
        self._epoch = ""  # scheduler_boot_id; empty before any Welcome
        self._past_epochs: deque[str] = deque(maxlen=REMEMBERED_EPOCHS)
        self._last_step_id = 0  # newest plan received in this epoch
        self._drain_deadline_s: float | None = None
        self._draining = asyncio.Event()
        self._left = False  # the last word is said
        self._hello_at = float("-inf")  # when hello was last said

    @property
    def malformed(self) -> int:
        """Frames from the scheduler that were no message."""
        return self._link.malformed

    def last_step_id(self) -> int:
        return self._last_step_id

    def send(self, message: Message) -> None:
        """Puts a message on the link. One that can't be sent is logged: the next heartbeat tells the same."""
        if self._left:
            return
        outcome = self._link.send(message)
        sent = outcome is transport.SendOutcome.SENT
        if not sent:
            log.debug("not sent to the scheduler", message=type(message).__name__, outcome=outcome.value)
        if sent == self._reachable:
            return
        self._reachable = sent
        if sent:
            log.info("the scheduler can be reached", scheduler=self._address)
        else:  # said once: it is tried at each heartbeat
            log.warning("no scheduler can be reached; it is tried again and again", scheduler=self._address)

    async def run(self) -> None:
        """Serves until a drain is over. Raises `ConfigError` if the scheduler refuses this worker."""
        tasks = [asyncio.create_task(part) for part in (self._receive(), self._beat(), self._drain())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def leave(self, reason: str, *, failed: bool) -> None:
        """The last word. `failed`: it broke, perhaps of what it was at work on."""
        self.send(WorkerDraining(self._me.worker_id, self._epoch, leaving=True, reason=reason, failed=failed))
        self._left = True

    def close(self) -> None:
        self._link.close()

    def on_boundary(self, boundary: Boundary) -> None:
        """Passes a step's result on. A result of a plan of an earlier scheduler says nothing to this one: a heartbeat
        tells it the progress, and failures are told for themselves."""
        self.residents.on_boundary(boundary)
        result = boundary.result
        log.debug(
            "step",
            step_id=result.step_id,
            requests=[progress.request_id for progress in result.progress],
            steps=[progress.step_index for progress in result.progress],
            rows=sum(timing.rows for timing in result.timings),
            seconds=round(sum(timing.seconds for timing in result.timings), 5),
            idle_s=round(result.idle_s, 5),
        )
        if result.scheduler_boot_id == self._epoch:
            self.send(result)
            return
        for failure in result.failed:
            self.send(
                RequestDone(self._me.worker_id, failure.request_id, failure.attempt, "error", error=failure.error)
            )
        # Now and not in half a second: the new scheduler's plan counts on what the last heartbeat said, and by now its
        # members may be past it.
        self._say_what_is_held()

    async def _beat(self) -> None:
        while True:
            self._credit.close_unused()
            if self._epoch:
                self._say_what_is_held()
            else:
                self._say_hello()
            await asyncio.sleep(self._heartbeat_s)

    def _say_what_is_held(self) -> None:
        self.send(
            WorkerHeartbeat(
                worker_id=self._me.worker_id,
                scheduler_boot_id=self._epoch,
                last_step_id=self._last_step_id,
                idle=self.steps.idle,
                residents=self.residents.snapshot(),
                credit_stalled=self._credit.stalled,
            )
        )

    def _say_hello(self) -> None:
        self._hello_at = time.monotonic()
        self.send(
            WorkerHello(
                worker_id=self._me.worker_id,
                protocol_version=PROTOCOL_VERSION,
                scheduler_boot_id=self._epoch,
                profile=self._me.profile,
                cost=self._me.cost,
                limits=self._me.limits,
                residents=self.residents.snapshot(),
                last_step_id=self._last_step_id,
                step_execution=self._me.step_execution,
                device=self._me.device,
            )
        )
        if self._draining.is_set():  # which an earlier scheduler was told
            self._say_that_it_drains()

    async def _receive(self) -> None:
        while True:
            message = (await self._link.receive()).message
            if isinstance(message, Welcome):
                self._on_welcome(message)
            elif isinstance(message, StepPlan):
                self._on_plan(message)
            elif isinstance(message, DrainWorker):
                self._drain_deadline_s = message.deadline_s
                self._draining.set()
            elif isinstance(message, Refused):
                raise ConfigError(f"the scheduler refuses this worker: {message.error.message}")

    def _on_welcome(self, welcome: Welcome) -> None:
        if welcome.scheduler_boot_id in self._past_epochs:
            return
        said_just_now = time.monotonic() - self._hello_at < self._heartbeat_s / 2
        if welcome.scheduler_boot_id == self._epoch and said_just_now:
            return  # an answer to one of the many messages that were sent before that hello
        self._enter_epoch(welcome.scheduler_boot_id)
        self._say_hello()

    def _enter_epoch(self, epoch: str) -> None:
        if epoch == self._epoch:
            return
        log.info("welcomed", scheduler=epoch, before=self._epoch)
        if self._epoch:
            self._past_epochs.append(self._epoch)
        self._epoch = epoch
        self._last_step_id = 0
        self.steps.begin_epoch()

    def _on_plan(self, plan: StepPlan) -> None:
        if plan.scheduler_boot_id in self._past_epochs:
            return
        if plan.scheduler_boot_id != self._epoch:  # its Welcome was lost
            self._enter_epoch(plan.scheduler_boot_id)
            self._say_hello()
        if plan.step_id < self._last_step_id:
            return
        for released in plan.released:
            self.residents.release(released)
        if not self._draining.is_set():
            for new in plan.new:
                self.residents.admit(new)
        if plan.step_id > self._last_step_id:  # an equal one is the same plan again
            self._last_step_id = plan.step_id
            self.steps.submit(plan)

    async def _drain(self) -> None:
        await self._draining.wait()
        log.info("draining", deadline_s=self._drain_deadline_s)
        self._say_that_it_drains()
        with contextlib.suppress(TimeoutError):  # what is left by then is made elsewhere
            await asyncio.wait_for(self.residents.wait_until_empty(), self._drain_deadline_s)

    def _say_that_it_drains(self) -> None:
        self.send(WorkerDraining(self._me.worker_id, self._epoch, reason="told to drain"))

    def _on_malformed(self, _sender: str, error: ProtocolError) -> None:
        log.warning("malformed message from the scheduler", error=str(error))
