"""The calls that this gateway holds, and the one outcome of each of their requests.

Role: the only owner of pending requests. Updates and pictures come in from the links, handlers wait here. A request
ends once: with its picture, or with an error; what comes later is counted and dropped. Ended calls are remembered for a
while, without prompt and picture, to answer progress queries and to tell a duplicate picture from a stranger's.
It knows no socket and no HTTP.

A completed update is no end: the picture travels on another link and may still be on its way.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from common.errors import ErrorInfo
from common.messages import ImageOutput, RequestClaim, RequestStatus, RequestUpdate
from common.params import DiffusionRequest
from services.gateway.errors import ApiError, from_info

KEEP_ENDED_S = 60.0
MAX_ENDED = 2_000  # ended calls remembered at most; the oldest go first


class Picture(NamedTuple):
    """A finished picture as its worker sent it."""

    message: ImageOutput
    payload: memoryview  # the file; holds the received frame in memory
    arrived_at: float


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One picture of a call."""

    request_id: str
    seed: int
    request: DiffusionRequest | None  # None once its call has ended
    asked_at: float  # when it was last submitted; monotonic seconds, as all times here
    heard_at: float  # of the newest update; its opening time before any
    status: RequestStatus = "waiting"
    update: RequestUpdate | None = None  # the newest
    picture: Picture | None = None  # dropped once its call has ended
    ended: Literal["", "completed", "error", "aborted"] = ""
    # What the scheduler will yet say of it although it has ended here: that is no second outcome.
    to_come: RequestStatus | None = None

    @property
    def claim(self) -> RequestClaim | None:
        """What a scheduler that lost its memory should know of it: that it was accepted, and where it ran if it did."""
        update = self.update
        if update is None:
            return None
        return RequestClaim(
            request_id=self.request_id,
            worker_id=update.worker_id,
            attempt=update.attempt,
            step_index=update.step_index,
            died_on=update.died_on,
        )


@dataclass(slots=True, eq=False)
class PendingCall:
    """One API call: n requests that succeed or fail together."""

    call_id: str
    client_request_id: str  # what the client calls it; may be empty
    model: str
    requests: tuple[PendingRequest, ...]
    created: int  # Unix seconds
    opened_at: float
    accepted: bool = False  # the scheduler has answered for one of its requests
    awaiting_answer: bool = False  # submitted, and nothing heard since
    submitted_at: float = 0.0
    error: ApiError | None = None
    ended_at: float | None = None  # None while its handler holds it
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # all pictures are here, or one error

    @property
    def unfinished(self) -> list[PendingRequest]:
        return [request for request in self.requests if not request.ended]


class ImageVerdict(NamedTuple):
    """What the data link does about a picture that came in."""

    known: bool  # somebody waits for it, or has had it
    superseded: bool  # it was taken, but the scheduler is at another attempt of it, which is to stop


class PendingCalls:
    """All calls, open and lately ended."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        on_ended: Callable[[PendingCall, PendingRequest], None] = lambda call, request: None,
    ) -> None:
        self._on_ended = on_ended  # told once of each request, with its outcome
        self._clock = clock
        self._wall_clock = wall_clock
        self._open: dict[str, PendingCall] = {}
        self._ended: OrderedDict[str, PendingCall] = OrderedDict()
        self._owners: dict[str, tuple[PendingCall, PendingRequest]] = {}  # by request id, of open and ended calls
        self._by_client_id: dict[str, PendingCall] = {}  # the newest call of that name
        self._closing: ApiError | None = None
        self.late_terminals = 0  # outcomes that came after the first
        self.strays = 0  # messages about requests that are not, or no longer, known here

    @property
    def pending(self) -> int:
        """Requests that clients wait for."""
        return sum(len(call.unfinished) for call in self._open.values())

    def open_calls(self) -> Iterator[PendingCall]:
        """Those that still wait for something."""
        return iter([call for call in self._open.values() if not call.settled.is_set()])

    def find(self, name: str) -> PendingCall | None:
        """The call of that id or, failing that, the newest that its client gave that name."""
        return self._open.get(name) or self._ended.get(name) or self._by_client_id.get(name)

    # What handlers do

    def open(self, call_id: str, client_request_id: str, requests: Sequence[DiffusionRequest]) -> PendingCall:
        """Takes in a call. Whoever opens it closes it."""
        if self._closing is not None:
            raise self._closing
        now = self._clock()
        pending = tuple(
            PendingRequest(
                request_id=request.request_id, seed=request.params.seed, request=request, asked_at=now, heard_at=now
            )
            for request in requests
        )
        call = PendingCall(
            call_id=call_id,
            client_request_id=client_request_id,
            model=requests[0].model,
            requests=pending,
            created=int(self._wall_clock()),
            opened_at=now,
        )
        self._open[call_id] = call
        for request in pending:
            self._owners[request.request_id] = (call, request)
        if client_request_id:
            self._by_client_id[client_request_id] = call
        return call

    async def wait(self, call: PendingCall, timeout_s: float) -> list[Picture]:
        """The call's pictures in order. Raises the `ApiError` that ends it instead."""
        try:
            async with asyncio.timeout(timeout_s):
                await call.settled.wait()
        except TimeoutError:
            self.fail(
                call,
                ApiError(
                    f"the call was not finished within {timeout_s:g} s",
                    status=504,
                    type="server_error",
                    code="deadline_exceeded",
                ),
            )
        if call.error is not None:
            raise call.error
        return [request.picture for request in call.requests if request.picture is not None]

    def close(self, call: PendingCall) -> tuple[str, ...]:
        """Ends the call. Returns the ids of the requests that nobody wants any more but that are not over."""
        unfinished = call.unfinished
        for request in unfinished:
            request.ended, request.status, request.to_come = "aborted", "finished_aborted", "finished_aborted"
            self._on_ended(call, request)
        for request in call.requests:
            request.request = request.picture = None
        call.ended_at = self._clock()
        call.settled.set()
        del self._open[call.call_id]
        self._ended[call.call_id] = call
        self.forget_ended()
        return tuple(request.request_id for request in unfinished)

    def forget_ended(self) -> None:
        """Drops the calls that ended long ago."""
        horizon = self._clock() - KEEP_ENDED_S
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if len(self._ended) <= MAX_ENDED and oldest.ended_at is not None and oldest.ended_at > horizon:
                return
            del self._ended[oldest.call_id]
            for request in oldest.requests:
                del self._owners[request.request_id]
            if self._by_client_id.get(oldest.client_request_id) is oldest:
                del self._by_client_id[oldest.client_request_id]

    def fail(self, call: PendingCall, error: ApiError) -> None:
        """Ends the wait with an error of this gateway's own. Its requests stay unfinished until `close`."""
        if not call.settled.is_set():
            call.error = error
            call.settled.set()

    def shut_down(self, error: ApiError) -> None:
        """Fails every open call, and every later one."""
        self._closing = error
        for call in self.open_calls():
            self.fail(call, error)

    # What the links bring

    def mark_submitted(self, call: PendingCall, requests: Sequence[PendingRequest]) -> None:
        """These requests have just been sent to the scheduler."""
        call.awaiting_answer = True
        call.submitted_at = self._clock()
        for request in requests:
            request.asked_at = call.submitted_at

    def on_update(self, update: RequestUpdate) -> None:
        """News of a request, which may be its end."""
        owner = self._owners.get(update.request_id)
        terminal = update.status in ("finished_error", "finished_aborted")
        if owner is None:
            self.strays += 1
            return
        call, request = owner
        if request.ended:
            self.late_terminals += terminal and update.status != request.to_come
            return
        now = self._clock()
        # A call is accepted all or none: the first answer, of no attempt, is that to all of its requests.
        refused = terminal and not call.accepted and update.attempt == 0
        call.accepted, call.awaiting_answer = True, False
        request.update, request.status, request.heard_at = update, update.status, now
        if terminal:
            for each in call.unfinished if refused else [request]:
                each.ended = "error" if update.status == "finished_error" else "aborted"
                each.to_come = update.status if each is not request else None
                self._on_ended(call, each)
            self.fail(call, from_info(update.error or _unexplained(update), update.retry_after_s))

    def wants(self, request_id: str) -> bool:
        """Whether somebody here still waits for it."""
        owner = self._owners.get(request_id)
        return owner is not None and not owner[1].ended

    def on_image(self, message: ImageOutput, payload: memoryview) -> ImageVerdict:
        """A picture, of whatever attempt."""
        owner = self._owners.get(message.request_id)
        if owner is None:
            self.strays += 1
            return ImageVerdict(known=False, superseded=False)
        call, request = owner
        if request.ended:
            self.late_terminals += 1
            return ImageVerdict(known=request.ended == "completed", superseded=False)
        request.picture = Picture(message, payload, self._clock())
        request.ended, request.status = "completed", "finished_completed"
        self._on_ended(call, request)
        # A worker that has it proves that it was accepted, whether or not the update got through.
        call.accepted, call.awaiting_answer = True, False
        if not call.unfinished:
            call.settled.set()
        newest = request.update.attempt if request.update is not None else 0
        return ImageVerdict(known=True, superseded=newest not in (0, message.attempt))


def _unexplained(update: RequestUpdate) -> ErrorInfo:
    if update.status == "finished_aborted":
        return ErrorInfo("aborted", "the request was aborted by the server")
    return ErrorInfo("internal", "the request failed, and nothing more is known")
