"""Every live request, in exactly one place, and what its gateway is told of it.

Role: the requests by id, the waiting queue, those held for a worker, the memory of finished ones, and each change of a
request's status together with the update that goes to its gateway. It must not know what workers are; a request's
worker is only a name here.
"""

from typing import NamedTuple

from common import messages as m
from common.errors import ErrorInfo
from common.params import DiffusionRequest
from services.scheduler.finished import FinishedRequests
from services.scheduler.queue import WaitingQueue
from services.scheduler.request import Request, transition


class Send(NamedTuple):
    """The one command of the core: this message, to this peer."""

    to: str
    message: m.FromScheduler


class RequestBook:
    """The live requests and the finished ones that are still remembered."""

    def __init__(
        self,
        outbox: list[Send],
        *,
        max_queue: int,
        max_attempts: int,
        reconcile_s: float,
        update_interval_s: float,
        finished: FinishedRequests,
    ) -> None:
        self._outbox = outbox
        self._max_attempts = max_attempts
        self._reconcile_s = reconcile_s  # how long a request is held for the worker that it was on
        self._update_interval_s = update_interval_s
        self._numbers = 0
        self.live: dict[str, Request] = {}
        self.queue = WaitingQueue(max_queue)
        self.held: dict[str, dict[str, Request]] = {}  # by the worker that they are held for, then by request id
        self.finished = finished

    @property
    def waiting(self) -> int:
        """Requests that wait: in the queue, or held for a worker."""
        return len(self.queue) + sum(map(len, self.held.values()))

    def has_room_for(self, count: int) -> bool:
        """Whether `count` new requests keep the queue's bound. Those that return from a lost worker need no room."""
        return self.waiting + count <= self.queue.max_waiting

    def admit(
        self,
        request: DiffusionRequest,
        work_s: float,
        now: float,
        *,
        call: str,
        accepted_before: bool,
        claim: m.RequestClaim | None,
    ) -> None:
        """Takes in a request. `claim` is what its gateway last heard of it from an earlier scheduler, if anything.

        It is queued or, if it was on a worker then, held for that worker.
        """
        self._numbers += 1
        record = Request(request, self._numbers, queued_work_s=work_s, call=call, accepted_before=accepted_before)
        self.live[request.request_id] = record
        if claim is not None:
            record.attempt, record.died_on = claim.attempt, claim.died_on
        if claim is not None and claim.worker_id:
            record.claim, record.held_until = claim, now + self._reconcile_s
            self.held.setdefault(claim.worker_id, {})[request.request_id] = record
        else:
            self.queue.add(record)
        self.tell(record, now)

    def enqueue(self, request: Request, now: float) -> None:
        """What was held for one worker waits for any."""
        self._leave_waiting(request)
        self.queue.add(request)
        self.tell(request, now)

    def dispatch(self, request: Request, worker_id: str, now: float) -> None:
        """From the queue to a worker, as a new attempt."""
        transition(request, "preparing", now, f"dispatched to {worker_id}")
        self.queue.remove(request)
        request.attempt += 1
        request.dispatches += 1
        self._put_on(request, worker_id)
        self.tell(request, now)

    def adopt(self, request: Request, worker_id: str, attempt: int, now: float) -> None:
        """To a worker that holds it already, from wherever it is. Its gateway is told with the next move."""
        if request.status == "waiting":
            self._leave_waiting(request)
        else:
            self._withdraw(request, now, f"{worker_id} is further with it")
        transition(request, "preparing", now, f"found on {worker_id}")
        request.attempt = attempt
        self._put_on(request, worker_id)

    def move(self, request: Request, status: m.RequestStatus, now: float, cause: str) -> None:
        """A change of status on its worker."""
        transition(request, status, now, cause)
        self.tell(request, now)

    def requeue(self, request: Request, now: float, cause: str, *, counts: bool = True) -> None:
        """Back to its old place in the queue, or to its end if it was dispatched too often.

        `counts`: whether this dispatch is one of those that it may have.
        """
        if not counts:
            request.dispatches = max(request.dispatches - 1, 0)
        elif request.dispatches >= self._max_attempts:
            text = f"given up after {request.dispatches} attempts: its workers were lost"
            self.finish(request, "finished_error", now, cause, ErrorInfo("worker_lost", text))
            return
        self._withdraw(request, now, cause)
        self.queue.add(request)
        self.tell(request, now)

    def finish(
        self, request: Request, status: m.RequestStatus, now: float, cause: str, error: ErrorInfo | None = None
    ) -> None:
        """The end of a request, from any live status."""
        waited = request.status == "waiting"
        transition(request, status, now, cause)
        if waited:
            self._leave_waiting(request)
        del self.live[request.request_id]
        self.finished.remember(self.tell(request, now, error), now)

    def pardon(self, worker_id: str) -> None:
        """A worker that was taken for dead speaks again, so it died of nothing."""
        for request in [request for request in self.live.values() if worker_id in request.died_on]:
            queued = request.status == "waiting" and request.claim is None
            if queued:
                self.queue.remove(request)  # its place there depends on whether it is on trial
            request.died_on = tuple(name for name in request.died_on if name != worker_id)
            if queued:
                self.queue.add(request)

    def progressed(self, request: Request, now: float) -> None:
        """Tells its gateway of a step, unless it was told something a moment ago."""
        if now - request.updated_at >= self._update_interval_s:
            self.tell(request, now)

    def tell(self, request: Request, now: float, error: ErrorInfo | None = None) -> m.RequestUpdate:
        """Tells its gateway where it stands."""
        claim = request.claim  # of a held one the gateway hears what it said itself, so that it can say so again
        update = m.RequestUpdate(
            request_id=request.request_id,
            status=request.status,
            attempt=request.attempt,
            worker_id=request.worker_id if claim is None else claim.worker_id,
            step_index=request.step_index if claim is None else claim.step_index,
            total_steps=request.total_steps,
            queue_position=self.queue.position(request) if request.status == "waiting" and claim is None else 0,
            error=error,
            died_on=request.died_on,
        )
        request.updated_at = now
        self._outbox.append(Send(request.gateway_id, update))
        return update

    def _put_on(self, request: Request, worker_id: str) -> None:
        request.worker_id = worker_id

    def _leave_waiting(self, request: Request) -> None:
        """Takes a waiting request out of the queue, or lets go of it if it is held."""
        claim = request.claim
        if claim is None:
            self.queue.remove(request)
            return
        held = self.held[claim.worker_id]
        del held[request.request_id]
        if not held:
            del self.held[claim.worker_id]
        request.claim = None

    def _withdraw(self, request: Request, now: float, cause: str) -> None:
        """Takes a request from its worker; what was done there counts no more."""
        transition(request, "waiting", now, cause)
        request.worker_id = ""
        request.step_index = request.total_steps = request.planned_step = 0
