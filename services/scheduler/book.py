"""Every live request, in exactly one place, and what its gateway is told of it.

Role: the requests by id, the waiting queue, the memory of finished ones, and each change of a request's status together
with the update that goes to its gateway. It must not know what workers are; a request's worker is only a name here.
"""

from collections import OrderedDict
from typing import NamedTuple

from common import messages as m
from common.errors import ErrorInfo
from common.params import DiffusionRequest
from services.scheduler.queue import WaitingQueue
from services.scheduler.request import Request, transition


class Send(NamedTuple):
    """The one command of the core: this message, to this peer."""

    to: str
    message: m.FromScheduler


class Finished(NamedTuple):
    """The memory of a request that has ended."""

    until: float  # when it is forgotten
    update: m.RequestUpdate  # its last


class RequestBook:
    """The live requests and the finished ones that are still remembered."""

    def __init__(
        self,
        outbox: list[Send],
        *,
        max_queue: int,
        max_attempts: int,
        update_interval_s: float,
        finished_for_s: float,
        max_finished: int,
    ) -> None:
        self._outbox = outbox
        self._max_attempts = max_attempts
        self._update_interval_s = update_interval_s
        self._finished_for_s = finished_for_s
        self._max_finished = max_finished
        self._numbers = 0
        self.live: dict[str, Request] = {}
        self.queue = WaitingQueue(max_queue)
        self.finished: OrderedDict[str, Finished] = OrderedDict()  # in the order in which they ended

    def admit(self, request: DiffusionRequest, attempt: int, work_s: float, now: float) -> None:
        """Queues a new request, which `attempt` earlier attempts of an earlier epoch may still haunt."""
        self._numbers += 1
        record = Request(request, self._numbers, attempt=attempt, queued_work_s=work_s)
        self.live[request.request_id] = record
        self.queue.add(record)
        self.tell(record, now)

    def dispatch(self, request: Request, worker_id: str, now: float) -> None:
        """From the queue to a worker, as a new attempt."""
        transition(request, "preparing", now, f"dispatched to {worker_id}")
        self.queue.remove(request)
        request.attempt += 1
        request.dispatches += 1
        request.worker_id = worker_id
        self.tell(request, now)

    def move(self, request: Request, status: m.RequestStatus, now: float, cause: str) -> None:
        """A change of status on its worker."""
        transition(request, status, now, cause)
        self.tell(request, now)

    def requeue(self, request: Request, now: float, cause: str) -> None:
        """Back to its old place in the queue, or to its end if it was dispatched too often."""
        if request.dispatches >= self._max_attempts:
            text = f"given up after {request.dispatches} attempts: its workers were lost"
            self.finish(request, "finished_error", now, cause, ErrorInfo("worker_lost", text))
            return
        transition(request, "waiting", now, cause)
        request.worker_id = ""
        request.step_index = request.total_steps = request.planned_step = 0
        self.queue.add(request)
        self.tell(request, now)

    def finish(
        self, request: Request, status: m.RequestStatus, now: float, cause: str, error: ErrorInfo | None = None
    ) -> None:
        """The end of a request, from any live status."""
        waited = request.status == "waiting"
        transition(request, status, now, cause)
        if waited:
            self.queue.remove(request)
        del self.live[request.request_id]
        update = self.tell(request, now, error)
        self.finished[request.request_id] = Finished(now + self._finished_for_s, update)
        while len(self.finished) > self._max_finished:
            self.finished.popitem(last=False)

    def forget(self, now: float) -> None:
        """Forgets finished requests whose time is over."""
        while self.finished and next(iter(self.finished.values())).until <= now:
            self.finished.popitem(last=False)

    def progressed(self, request: Request, now: float) -> None:
        """Tells its gateway of a step, unless it was told something a moment ago."""
        if now - request.updated_at >= self._update_interval_s:
            self.tell(request, now)

    def tell(self, request: Request, now: float, error: ErrorInfo | None = None) -> m.RequestUpdate:
        """Tells its gateway where it stands."""
        update = m.RequestUpdate(
            request_id=request.request_id,
            status=request.status,
            attempt=request.attempt,
            worker_id=request.worker_id,
            step_index=request.step_index,
            total_steps=request.total_steps,
            queue_position=self.queue.position(request) if request.status == "waiting" else 0,
            error=error,
        )
        request.updated_at = now
        self._outbox.append(Send(request.gateway_id, update))
        return update
