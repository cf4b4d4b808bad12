"""Requests found on workers: after a restart of the scheduler, or when a worker comes back.

Role: brings together what gateways submit and what workers hold, in whichever order the two arrive. It owns the index
of the unclaimed residents, whose requests no gateway has asked for yet; requests that are held for a worker are the
book's. It must not know how plans are made.

Theory of operation. A scheduler that has just started knows nothing. Gateways submit again what they wait for and say
on which worker it last was; workers say what they hold. A request that a worker holds goes on there, at the step that
it has reached, as soon as both have spoken. One that was on a worker which has not spoken yet is held for it, for
`reconcile_s` at most; once that worker has said hello and does not hold it, it waits in the queue like any other. A
resident that no gateway has asked for is released `reconcile_s` after its worker became known. Nothing else waits.

The same request may be on two workers, because one was taken for lost. The highest attempt counts, and among equals the
one with most steps; the other is released. An attempt below the one that its gateway has heard of is never taken up.
"""

from common import messages as m
from services.scheduler.assignment import Assignment
from services.scheduler.book import RequestBook
from services.scheduler.request import Request
from services.scheduler.workers import Fleet, Worker


class Adoption:
    """Matches residents with requests."""

    def __init__(self, book: RequestBook, fleet: Fleet, assignment: Assignment) -> None:
        self._book = book
        self._fleet = fleet
        self._assignment = assignment
        # The workers that have a request among their unclaimed residents, by request id, then by worker id.
        self.holders: dict[str, dict[str, Worker]] = {}

    def heard(self, worker: Worker, strangers: list[m.Resident], now: float) -> None:
        """`worker` has said all that it holds; `strangers` are those that it was not known to hold."""
        for request_id in list(worker.unclaimed):
            self._put_away(worker, request_id)
        for resident in strangers:
            request = self._book.live.get(resident.request_id)
            if request is not None:
                self._offer(request, worker, resident, now)
            elif resident.request_id not in self._book.finished and now < worker.claims_until:
                worker.unclaimed[resident.request_id] = resident
                self.holders.setdefault(resident.request_id, {})[worker.worker_id] = worker
            else:
                worker.forget(resident.request_id, resident.attempt)

    def arrived(self, worker: Worker, now: float) -> None:
        """`worker` has said hello. What is still held for it is not there."""
        for request in list(self._book.held.get(worker.worker_id, {}).values()):
            self._release_held(request, now)

    def gone(self, worker: Worker) -> None:
        """`worker` is lost, and what nobody had asked for with it."""
        for request_id in list(worker.unclaimed):
            self._put_away(worker, request_id)

    def submitted(self, request_id: str, now: float) -> None:
        """A gateway has submitted a request, which is live unless it was refused or has ended."""
        request = self._book.live.get(request_id)
        if request is None:
            return
        holders = list(self.holders.get(request_id, {}).values())
        for worker in sorted(holders, key=lambda holder: _rank(holder.unclaimed[request_id]), reverse=True):
            resident = worker.unclaimed[request_id]
            self._put_away(worker, request_id)
            self._offer(request, worker, resident, now)
            self._assignment.touch(worker)
            self._assignment.free(worker)
        claim = request.claim
        if claim is not None and (claim.worker_id in self._fleet.workers or request.held_until <= now):
            self._release_held(request, now)

    def done(self, worker: Worker, done: m.RequestDone, now: float) -> None:
        """`worker` is through with a request. If it was unclaimed, its gateway may yet ask for it.

        A picture that the gateway has is one, of whatever attempt. A failure may be of an attempt that counts no more.
        """
        resident = worker.unclaimed.get(done.request_id)
        if resident is None or resident.attempt != done.attempt:
            return
        self._put_away(worker, done.request_id)
        self._assignment.free(worker)
        if done.outcome == "completed":
            last = m.RequestUpdate(done.request_id, "finished_completed", done.attempt, worker.worker_id)
            self._book.finished.remember(last, now)

    def next_deadline(self) -> float | None:
        """When to call `tick` at the latest."""
        held = (request.held_until for requests in self._book.held.values() for request in requests.values())
        unclaimed = (worker.claims_until for holders in self.holders.values() for worker in holders.values())
        return min((*held, *unclaimed), default=None)

    def tick(self, now: float) -> None:
        """Gives up what was waited for long enough."""
        for request in [r for requests in self._book.held.values() for r in requests.values() if r.held_until <= now]:
            self._release_held(request, now)
        for request_id, worker in [(r, w) for r, workers in self.holders.items() for w in workers.values()]:
            if worker.claims_until <= now:
                resident = worker.unclaimed[request_id]
                self._put_away(worker, request_id)
                worker.forget(request_id, resident.attempt)
                self._assignment.touch(worker)
                self._assignment.free(worker)

    def _offer(self, request: Request, worker: Worker, resident: m.Resident, now: float) -> None:
        """Has the request go on on `worker`, or what that holds of it released."""
        released = (resident.request_id, resident.attempt) in worker.unconfirmed_releases
        fits = request.request.model == worker.model and not worker.is_full()
        if fits and not released and _is_ahead(resident, request):
            self._assignment.adopt(request, worker, resident, now)
        else:
            worker.forget(resident.request_id, resident.attempt)

    def _release_held(self, request: Request, now: float) -> None:
        self._book.enqueue(request, now)
        self._assignment.look_at(request.request.model)

    def _put_away(self, worker: Worker, request_id: str) -> None:
        del worker.unclaimed[request_id]
        holders = self.holders[request_id]
        del holders[worker.worker_id]
        if not holders:
            del self.holders[request_id]


def _rank(resident: m.Resident) -> tuple[int, int]:
    return resident.attempt, resident.step_index


def _is_ahead(resident: m.Resident, request: Request) -> bool:
    """Whether what a worker holds is the one to go on with, rather than where the request stands now."""
    if request.status == "waiting":
        return resident.attempt >= request.attempt
    return _rank(resident) > (request.attempt, request.step_index)
