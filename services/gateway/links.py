"""The gateway's two ZeroMQ links.

Role: `ControlLink` (a DEALER to the scheduler) says hello, beats, submits and aborts, and heals what was lost on the
way; `DataLink` (a ROUTER that workers connect to) takes pictures and acknowledges each of them. What a message means
for a request is decided in `pending`; no HTTP here.

How losses heal: a submission that nothing answered is sent again after `resend_s`; a request that was quiet for
`silence_s` is submitted again, with what was last heard of it; so are all of them to a new scheduler epoch. An abort
that got lost, or a picture that is drawn a second time, shows in an update about a request that nobody waits for here,
which is answered by an abort. A scheduler that says nothing for
`hello_again_s` is asked by a hello, which it answers.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog
from msgspec import Struct

from common import messages as m
from common.config import HEARTBEAT_S
from common.errors import ConfigError
from common.transport import Link, SendOutcome
from services.gateway.errors import ApiError
from services.gateway.models import ModelTable
from services.gateway.pending import PendingCall, PendingCalls, PendingRequest

log = structlog.get_logger()


class LinkTiming(Struct, frozen=True, kw_only=True):
    """Seconds, after which the control link does something about silence."""

    tick_s: float = 0.1  # how often it looks
    heartbeat_s: float = HEARTBEAT_S
    resend_s: float = 1.0  # an unanswered submission, or abort, is sent again
    silence_s: float = 5.0  # a request that nothing was heard of is submitted again
    hello_again_s: float = 2.0  # a silent scheduler is asked whether it is there
    alive_s: float = 5.0  # a silent scheduler is held for gone: the gateway isn't ready
    # A call that no scheduler ever answered for gets a 503: nothing is lost by trying again.
    accept_s: float = 5.0
    # An accepted call outlives a scheduler's restart, but not for ever: 503 when it stays away as long as this.
    gone_s: float = 30.0


class ControlLink:
    """The link to the scheduler."""

    def __init__(
        self,
        link: Link[m.ToGateway],
        gateway_id: str,
        calls: PendingCalls,
        models: ModelTable,
        timing: LinkTiming,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._gateway_id = gateway_id
        self._calls = calls
        self._models = models
        self._timing = timing
        self._clock = clock
        self._epoch = ""  # scheduler_boot_id; empty before any
        self._heard_at: float | None = None  # when the scheduler last said anything
        self._hello_at = float("-inf")
        self._beat_at = float("-inf")
        self._opened_at = clock()
        self._noted_alive = True  # what the log last said
        self._aborts: dict[str, float] = {}  # request id to when its abort was last sent; kept for `gone_s`
        self.unsent = 0  # messages that ZeroMQ did not take; each is healed by a later one

    @property
    def malformed(self) -> int:
        """Frames from the scheduler that were no message."""
        return self._link.malformed

    @property
    def alive(self) -> bool:
        """Whether the scheduler was heard lately."""
        return self._silence_s() < self._timing.alive_s

    def submit(self, call: PendingCall) -> None:
        """Sends the call's unfinished requests to the scheduler."""
        self._submit(call, call.unfinished)

    def abort(self, request_ids: Sequence[str], reason: str) -> None:
        """Tells the scheduler that nobody wants these any more."""
        now = self._clock()
        self._aborts.update((request_id, now) for request_id in request_ids)
        self._send(m.AbortRequest(gateway_id=self._gateway_id, request_ids=tuple(request_ids), reason=reason))

    async def receive(self) -> None:
        """Takes what the scheduler sends, for ever. Raises `ConfigError` if it refuses this gateway."""
        while True:
            received = await self._link.receive()
            self._heard_at = self._clock()
            match received.message:
                case m.RequestUpdate() as update:
                    self._on_update(update)
                case m.ModelsUpdate() as news:
                    self._join(news.scheduler_boot_id)
                    self._models.update(news.models)
                case m.Welcome() as welcome:
                    self._on_welcome(welcome)
                case m.Refused() as refused:
                    raise ConfigError(f"the scheduler refuses this gateway: {refused.error.message}")

    async def keep_alive(self) -> None:
        """Beats, and sends again what stayed unanswered, for ever."""
        while True:
            now = self._clock()
            if now - self._beat_at >= self._timing.heartbeat_s:
                self._beat(now)
            self._note_liveness(now)
            self._heal(now)
            self._calls.forget_ended()
            self._aborts = {name: sent for name, sent in self._aborts.items() if now - sent < self._timing.gone_s}
            await asyncio.sleep(self._timing.tick_s)

    def _note_liveness(self, now: float) -> None:
        if self.alive != self._noted_alive and now - self._opened_at >= self._timing.hello_again_s:
            self._noted_alive = self.alive
            if self.alive:
                log.info("the scheduler is heard again")
            else:
                log.warning("the scheduler is not heard")

    def _silence_s(self) -> float:
        return float("inf") if self._heard_at is None else self._clock() - self._heard_at

    def _send(self, message: m.FromGateway) -> None:
        if self._link.send(message) is not SendOutcome.SENT:
            self.unsent += 1

    def _hello(self, epoch: str) -> None:
        self._hello_at = self._clock()
        self._send(
            m.GatewayHello(gateway_id=self._gateway_id, protocol_version=m.PROTOCOL_VERSION, scheduler_boot_id=epoch)
        )

    def _beat(self, now: float) -> None:
        self._beat_at = now
        # A scheduler that is away is only said hello to: ZeroMQ keeps what is sent meanwhile and delivers all of it.
        if self.alive and self._epoch:
            self._send(
                m.GatewayHeartbeat(
                    gateway_id=self._gateway_id, scheduler_boot_id=self._epoch, pending=self._calls.pending
                )
            )
        if self._silence_s() >= self._timing.hello_again_s and (
            not self.alive or now - self._hello_at >= self._timing.hello_again_s / 2
        ):
            self._hello(self._epoch)

    def _on_welcome(self, welcome: m.Welcome) -> None:
        if welcome.scheduler_boot_id == self._epoch and self._clock() - self._hello_at < self._timing.heartbeat_s / 2:
            return  # an answer to something that was sent before that hello
        known = welcome.scheduler_boot_id == self._epoch
        self._hello(welcome.scheduler_boot_id)
        if known:  # it has forgotten this gateway, and with it the requests
            self._submit_all()
        else:
            self._join(welcome.scheduler_boot_id)

    def _join(self, epoch: str) -> None:
        if epoch != self._epoch:
            log.info("scheduler joined", scheduler_boot_id=epoch, pending=self._calls.pending)
            if self._epoch:
                self._models.scheduler_restarted()
            self._epoch = epoch
            self._submit_all()

    def _submit_all(self) -> None:
        for call in self._calls.open_calls():
            self.submit(call)

    def _on_update(self, update: m.RequestUpdate) -> None:
        self._calls.on_update(update)
        if update.status.startswith("finished_"):
            self._aborts.pop(update.request_id, None)
        # A request that is being decoded is about to end, and its picture may just have come.
        elif update.status != "decoding" and not self._calls.wants(update.request_id):
            aborted_at = self._aborts.get(update.request_id, float("-inf"))
            if self._clock() - aborted_at >= self._timing.resend_s:
                self.abort((update.request_id,), "nobody waits for it here")

    def _submit(self, call: PendingCall, requests: Sequence[PendingRequest]) -> None:
        self._send(
            m.SubmitRequests(
                gateway_id=self._gateway_id,
                requests=tuple(pending.request for pending in requests if pending.request is not None),
                claims=tuple(pending.claim for pending in requests if pending.claim is not None),
            )
        )
        self._calls.mark_submitted(call, requests)

    def _heal(self, now: float) -> None:
        timing = self._timing
        for call in self._calls.open_calls():
            if not call.accepted and now - call.opened_at >= timing.accept_s:
                self._calls.fail(call, _unavailable("the scheduler does not answer; nothing was accepted"))
            elif call.accepted and self._silence_s() >= timing.gone_s:
                self._calls.fail(call, _unavailable("the scheduler went away and did not come back"))
            elif call.awaiting_answer:
                if now - call.submitted_at >= timing.resend_s:
                    self.submit(call)
            else:
                quiet = [
                    request
                    for request in call.unfinished
                    if now - max(request.heard_at, request.asked_at) >= timing.silence_s
                ]
                if quiet:
                    self._submit(call, quiet)


class DataLink:
    """The link that workers push pictures to."""

    def __init__(
        self, link: Link[m.DataToGateway], calls: PendingCalls, abort: Callable[[Sequence[str], str], None]
    ) -> None:
        self._link = link
        self._calls = calls
        self._abort = abort
        self.truncated = 0  # pictures whose payload had not the length that their message says
        self.unsent = 0  # answers that ZeroMQ did not take; the worker asks again

    @property
    def malformed(self) -> int:
        """Frames from workers that were no message."""
        return self._link.malformed

    async def receive(self) -> None:
        """Takes what workers send, for ever."""
        while True:
            received = await self._link.receive()
            match received.message:
                case m.ImageOutput() as image:
                    self._on_image(received.sender, image, received.payload)
                case m.FetchInput() as fetch:
                    answer = m.InputData(
                        request_id=fetch.request_id,
                        attempt=fetch.attempt,
                        role=fetch.role,
                        index=fetch.index,
                        found=False,
                    )
                    self._answer(received.sender, answer, b"")
                case m.FetchCheckpoint() as fetch:
                    missing = m.CheckpointData(request_id=fetch.request_id, attempt=fetch.attempt, found=False)
                    self._answer(received.sender, missing, b"")
                case m.PreviewOutput() | m.Checkpoint():
                    pass  # neither is asked for yet, and neither is acknowledged

    def _on_image(self, sender: str, image: m.ImageOutput, payload: memoryview) -> None:
        if image.nbytes != payload.nbytes or not payload.nbytes:
            # No acknowledgement: that would say that the picture is needed no more.
            self.truncated += 1
            log.warning(
                "picture dropped: wrong payload length",
                request_id=image.request_id,
                worker_id=image.worker_id,
                expected=image.nbytes,
                got=payload.nbytes,
            )
            return
        verdict = self._calls.on_image(image, payload)
        self._answer(sender, m.ImageAck(request_id=image.request_id, attempt=image.attempt, known=verdict.known))
        if verdict.superseded:
            self._abort((image.request_id,), "another attempt has delivered the picture")

    def _answer(self, to: str, message: m.DataToWorker, payload: bytes | None = None) -> None:
        if self._link.send(message, to=to, payload=payload) is not SendOutcome.SENT:
            self.unsent += 1


def _unavailable(message: str) -> ApiError:
    return ApiError(message, status=503, type="server_error", code="scheduler_unavailable", retry=True)
