"""Requests that a worker may have died of: who is blamed, who runs apart, and who is acquitted.

Role: the rules, as functions of records. It changes the marks on a request and nothing else; it must not know queues,
plans or the lifecycle.

Theory of operation. When a worker dies, it may have died of any request that it was at work on: all of them bear its
name in `died_on`, and are on trial. A worker takes one such request at a time, among others that are not: if it dies
too, that one is to blame and nobody else. Two such deaths convict a request, and it ends before it takes a third worker
along. One that gets past the point at which its worker died is acquitted, so after an ordinary death, of a machine or a
network, the trials are soon over. A worker that speaks again has not died at all.
"""

from services.scheduler.request import Request
from services.scheduler.workers import Worker

MAX_WORKER_DEATHS = 2  # of workers that may have died of a request; then it gets no other


def to_blame(worker: Worker) -> list[Request]:
    """The requests that `worker`, which has died, may have died of.

    It may have been at work on what it was to prepare or to decode, or to run in any plan that it may have begun. A
    request that only stood by, prepared or preempted, is innocent.
    """
    planned = {request_id for plan in worker.outstanding for request_id in plan.until}
    residents = [residency.request for residency in worker.residents.values()]
    at_work = [r for r in residents if r.status in ("preparing", "running", "decoding") or r.request_id in planned]
    return [request for request in at_work if on_trial(request)] or at_work


def blame(request: Request) -> None:
    """The worker that has the request died, perhaps of it."""
    request.died_on += (request.worker_id,)
    request.died_at_step = None if request.status == "decoding" else request.planned_step


def on_trial(request: Request) -> bool:
    """Whether a worker has died of it, as far as is known."""
    return bool(request.died_on)


def is_convicted(request: Request) -> bool:
    """Whether it may be given to no other worker."""
    return len(request.died_on) >= MAX_WORKER_DEATHS


def has_passed(request: Request) -> bool:
    """Whether a request on trial has got past what its worker died at.

    That was a step up to `died_at_step`, which is 0 if it was being prepared. Of a decode, or where it is not known,
    there is no way past but the request's end.
    """
    if request.died_at_step is None or request.status in ("waiting", "preparing"):
        return False
    return request.step_index >= request.died_at_step


def acquit(request: Request) -> None:
    """Nobody died of it."""
    request.died_on = ()
    request.died_at_step = None


def has_room_for(worker: Worker, request: Request) -> bool:
    """Whether `worker`, which has room, may take the request: of those on trial it takes one at a time."""
    return not on_trial(request) or not any(on_trial(r.request) for r in worker.residents.values())
