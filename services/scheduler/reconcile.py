"""What a worker's word means for the requests that it holds.

Role: moves request records along the lifecycle to where their worker says that they are, and finds what worker and
scheduler disagree on. It must not know gateways, time-outs or how plans are made; what becomes of residents that
should not be there is decided in `adoption`.
"""

from collections.abc import Iterable
from typing import NamedTuple

from common import messages as m
from services.scheduler.book import RequestBook
from services.scheduler.workers import Residency, Worker


def prepared(
    book: RequestBook, worker: Worker, residency: Residency, step_index: int, total_steps: int, now: float
) -> None:
    """A preparing request can run, from `step_index` on."""
    request = residency.request
    request.step_index = request.planned_step = step_index
    request.total_steps = max(total_steps, step_index)
    book.move(request, "ready", now, f"prepared by {worker.worker_id}")
    worker.weigh(residency)
    worker.changed = True
    worker.running = None
    if request.step_index >= request.total_steps:
        decoding(book, worker, residency, now)


def progressed(book: RequestBook, worker: Worker, residency: Residency, step_index: int, now: float) -> None:
    """A request has `step_index` steps behind it. Old news and impossible indices are ignored."""
    request = residency.request
    if not request.step_index < step_index <= request.total_steps:
        return
    request.step_index = step_index
    if step_index > request.planned_step:
        request.planned_step = step_index
    worker.weigh(residency)
    worker.changed = True
    if step_index == request.total_steps:
        decoding(book, worker, residency, now)
    else:
        book.progressed(request, now)


def decoding(book: RequestBook, worker: Worker, residency: Residency, now: float) -> None:
    """All steps of a request are done, whatever was last heard of it."""
    request = residency.request
    if request.status == "decoding":
        return
    cause = f"all steps done on {worker.worker_id}"
    if request.status == "preparing":
        book.move(request, "ready", now, cause)
    if request.status in ("ready", "preempted"):
        book.move(request, "running", now, cause)
    request.step_index = request.planned_step = request.total_steps
    book.move(request, "decoding", now, cause)
    worker.weigh(residency)
    worker.changed = True


class Differences(NamedTuple):
    """What worker and scheduler disagree on."""

    # It must have received them by its newest plan but does not hold them any more. What it sent about them came before
    # it said so, so nothing more will.
    missing: list[Residency]
    strangers: list[m.Resident]  # attempts that it holds and, as far as is known here, should not


def residents(
    book: RequestBook, worker: Worker, reported: Iterable[m.Resident], last_step_id: int, now: float
) -> Differences:
    """Takes over what a worker says that it holds."""
    worker.confirm(last_step_id)
    held: set[str] = set()
    strangers: list[m.Resident] = []
    for resident in reported:
        residency = worker.holds(resident.request_id, resident.attempt)
        if residency is None:
            strangers.append(resident)
            continue
        held.add(resident.request_id)
        worker.unconfirmed_new.pop(resident.request_id, None)
        follow(book, worker, residency, resident, now)
    missing = [
        residency
        for request_id, residency in worker.residents.items()
        if request_id not in held and 0 < residency.first_step_id <= last_step_id
    ]
    return Differences(missing, strangers)


def follow(book: RequestBook, worker: Worker, residency: Residency, resident: m.Resident, now: float) -> None:
    """Moves a request on to where its worker says that it is."""
    if resident.phase == "preparing":
        return
    if residency.request.status == "preparing":
        prepared(book, worker, residency, resident.step_index, resident.total_steps, now)
    if resident.phase == "decoding":
        decoding(book, worker, residency, now)
    else:
        progressed(book, worker, residency, resident.step_index, now)


def running(book: RequestBook, worker: Worker, now: float) -> None:
    """Lets statuses follow the plan that the worker is believed to run."""
    members = tuple(worker.outstanding[0].until) if worker.outstanding else ()
    if members == worker.running:
        return
    worker.running = members
    for request_id, residency in worker.residents.items():
        request = residency.request
        if request_id in members:
            if request.status in ("ready", "preempted"):
                book.move(request, "running", now, f"in a plan of {worker.worker_id}")
        elif request.status == "running":
            book.move(request, "preempted", now, f"left out by a plan of {worker.worker_id}")
