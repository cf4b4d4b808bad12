"""Requests onto workers and off them.

Role: everything that changes which worker holds which request, and, once an event is handled, what follows from it:
waiting requests are dispatched where there is room, and workers are sent the plans that they lack. It owns the lists of
models and workers that an event has touched, so that nothing else is looked at.
"""

from collections.abc import Callable, Collection

from common import messages as m
from common.errors import ErrorInfo
from services.scheduler import quarantine, reconcile
from services.scheduler.book import RequestBook
from services.scheduler.placement import least_work
from services.scheduler.planning import Planner
from services.scheduler.request import Request
from services.scheduler.workers import Fleet, Residency, Worker


class Assignment:
    """Moves requests between the book's queue and the fleet's workers."""

    def __init__(
        self, book: RequestBook, fleet: Fleet, planner: Planner, send: Callable[[str, m.StepPlan], None]
    ) -> None:
        self._book = book
        self._fleet = fleet
        self._planner = planner
        self._send = send
        self._to_plan: dict[str, Worker] = {}
        self._to_dispatch: dict[str, None] = {}  # names of models

    # What an event does

    def touch(self, worker: Worker) -> None:
        """`worker` may need a plan."""
        self._to_plan[worker.worker_id] = worker

    def look_at(self, model: str) -> None:
        """Requests of `model` may be dispatched."""
        self._to_dispatch[model] = None

    def free(self, worker: Worker) -> None:
        """`worker` may have room now."""
        self._fleet.refresh(worker)
        self.look_at(worker.model)

    def complete(self, worker: Worker, residency: Residency, now: float) -> None:
        """The picture is delivered."""
        reconcile.decoding(self._book, worker, residency, now)
        self._book.finish(residency.request, "finished_completed", now, f"delivered by {worker.worker_id}")
        worker.has_completed = True
        self._take_off(worker, residency)

    def fail(self, worker: Worker, residency: Residency, now: float, error: ErrorInfo) -> None:
        """The request has ended on its worker, which has told why."""
        self._book.finish(residency.request, "finished_error", now, f"{error.code} on {worker.worker_id}", error)
        self._take_off(worker, residency)

    def abort(self, request: Request, now: float, cause: str) -> None:
        """Nobody wants the request any more, wherever it is."""
        self._end(request, "finished_aborted", now, cause, ErrorInfo("aborted", "the request was aborted"))

    def _end(self, request: Request, status: m.RequestStatus, now: float, cause: str, error: ErrorInfo) -> None:
        worker = self._fleet.workers.get(request.worker_id)
        self._book.finish(request, status, now, cause, error)
        if worker is not None:
            self._take_off(worker, worker.residents[request.request_id])
            worker.release(request.request_id, request.attempt, "aborted" if status == "finished_aborted" else "error")

    def requeue(self, worker: Worker, residency: Residency, now: float, cause: str) -> None:
        """The request is not where it should be: it waits for another attempt."""
        request = residency.request
        self._book.requeue(request, now, cause)
        self._take_off(worker, residency)
        worker.release(request.request_id, request.attempt, "superseded")

    def adopt(self, request: Request, worker: Worker, resident: m.Resident, now: float) -> None:
        """`worker` holds the request, although nobody here gave it to it: the request goes on there."""
        before = self._fleet.workers.get(request.worker_id)
        if before is not None:
            self._take_off(before, before.residents[request.request_id])
            before.release(request.request_id, request.attempt, "superseded")
        self._book.adopt(request, worker.worker_id, resident.attempt, now)
        residency = worker.take(request, found=True)
        reconcile.follow(self._book, worker, residency, resident, now)
        if request.status == "preparing":
            self._book.tell(request, now)
        elif request.status == "ready" and request.step_index > 0:
            self._book.move(request, "running", now, f"part-way on {worker.worker_id}")
        self.touch(worker)
        self._fleet.refresh(worker)

    def passed_a_point(self, request: Request) -> None:
        """The request was prepared or ran a step. If it was on trial that may be over, and another's may begin."""
        if request.on_trial and quarantine.has_passed(request):
            quarantine.acquit(request)
            self._fleet.workers[request.worker_id].end_trial(request.request_id)
            self.look_at(request.request.model)

    def lose(self, worker: Worker, now: float, cause: str, *, died: bool) -> None:
        """A worker is gone: its requests wait for another. If it took its leave, they are none the worse for it."""
        self._fleet.remove(worker)
        self._to_plan.pop(worker.worker_id, None)
        suspects = quarantine.at_work(worker) if died else []
        convicted = [request for request in suspects if request.on_trial]
        for request in suspects:
            quarantine.blame(request)
        for residency in worker.residents.values():
            if residency.request not in convicted:
                self._book.requeue(residency.request, now, cause, counts=died)
        for request in convicted:
            if request.request_id in self._book.live:  # not gone with another of its call
                self._convict(request, now, cause)
        self.look_at(worker.model)

    def _convict(self, request: Request, now: float, cause: str) -> None:
        """The request ends, and with it those of its call that are on trial too: they differ in no more than seeds."""
        text = "two workers died while they worked on this request, or on another picture of its call"
        error = ErrorInfo("worker_died_twice", f"{text}, so no other is given it")
        for each in [live for live in self._book.live.values() if live.call == request.call and live.on_trial]:
            self._end(each, "finished_error", now, cause, error)

    def _take_off(self, worker: Worker, residency: Residency) -> None:
        worker.drop(residency)
        self.touch(worker)
        self.free(worker)

    # What follows

    def follow_up(self, now: float) -> None:
        """Dispatches and plans what the event has made possible."""
        for model in self._to_dispatch:
            self._dispatch(model, now)
        self._to_dispatch.clear()
        for worker in self._to_plan.values():
            while (plan := self._planner.next_plan(worker, now)) is not None:
                self._send(worker.worker_id, plan)
            reconcile.running(self._book, worker, now)
        self._to_plan.clear()

    def _dispatch(self, model_name: str, now: float) -> None:
        """Sends waiting requests of a model to workers as long as there are both."""
        model = self._fleet.models.get(model_name)
        while model is not None and (pair := self._next_pair(model_name, model.open.values())) is not None:
            request, worker = pair
            self._book.dispatch(request, worker.worker_id, now)
            worker.take(request)
            self._fleet.refresh(worker)
            self.touch(worker)

    def _next_pair(self, model_name: str, workers: Collection[Worker]) -> tuple[Request, Worker] | None:
        """The next waiting request that one of the `workers`, all with room, may take, and that worker.

        One on trial goes before others, to a worker that tries no other, and rather to one that has proved itself: a
        machine that dies of anything must not convict a request each time that it starts again.
        """
        queue = self._book.queue
        if (tried := queue.head(model_name, on_trial=True)) is not None:
            free = [worker for worker in workers if not worker.trials]
            worker = least_work([worker for worker in free if worker.has_completed] or free)
            if worker is not None:
                return tried, worker
        head = queue.head(model_name)
        worker = least_work(workers) if head is not None else None
        return (head, worker) if head is not None and worker is not None else None
