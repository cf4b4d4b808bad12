"""Requests onto workers and off them.

Role: everything that changes which worker holds which request, and, once an event is handled, what follows from it:
waiting requests are dispatched where there is room, and workers are sent the plans that they lack. It owns the lists of
models and workers that an event has touched, so that nothing else is looked at.
"""

from collections.abc import Callable

from common import messages as m
from common.errors import ErrorInfo
from services.scheduler import quarantine, reconcile
from services.scheduler.book import RequestBook
from services.scheduler.placement import least_work
from services.scheduler.planning import Planner
from services.scheduler.request import Request
from services.scheduler.workers import Fleet, Model, Residency, Worker


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
        self._take_off(worker, residency)

    def fail(self, worker: Worker, residency: Residency, now: float, error: ErrorInfo) -> None:
        """The request has ended on its worker, which has told why."""
        self._book.finish(residency.request, "finished_error", now, f"{error.code} on {worker.worker_id}", error)
        self._take_off(worker, residency)

    def abort(self, request: Request, now: float, cause: str) -> None:
        """Nobody wants the request any more, wherever it is."""
        worker = self._fleet.workers.get(request.worker_id)
        self._book.finish(request, "finished_aborted", now, cause, ErrorInfo("aborted", "the request was aborted"))
        if worker is not None:
            self._take_off(worker, worker.residents[request.request_id])
            worker.release(request.request_id, request.attempt, "aborted")

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
        if quarantine.on_trial(request) and quarantine.has_passed(request):
            quarantine.acquit(request)
            self.look_at(request.request.model)

    def lose(self, worker: Worker, now: float, cause: str, *, died: bool) -> None:
        """A worker is gone: its requests wait for another. If it took its leave, they are none the worse for it."""
        self._fleet.remove(worker)
        self._to_plan.pop(worker.worker_id, None)
        to_blame = quarantine.to_blame(worker) if died else []
        for residency in worker.residents.values():
            blamed = residency.request in to_blame
            self._book.requeue(residency.request, now, cause, died=blamed, counts=blamed)
        self.look_at(worker.model)

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
        while model is not None and (pair := self._next_pair(model_name, model)) is not None:
            request, worker = pair
            self._book.dispatch(request, worker.worker_id, now)
            worker.take(request)
            self._fleet.refresh(worker)
            self.touch(worker)

    def _next_pair(self, model_name: str, model: Model) -> tuple[Request, Worker] | None:
        """The first waiting request that some worker may take now, and that worker."""
        if not model.open:
            return None
        for request in self._book.queue.waiting(model_name):
            worker = least_work(w for w in model.open.values() if quarantine.has_room_for(w, request))
            if worker is not None:
                return request, worker
        return None
