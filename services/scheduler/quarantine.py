"""Requests that a worker may have died of: who is blamed, who is convicted, and who is acquitted.

Role: the rules, as functions of records. It changes the marks on a request and nothing else; it must not know queues,
plans or the lifecycle.

Theory of operation. When a worker dies, it may have died of any request that it was at work on: all of them bear its
name in `died_on`, and are on trial. A worker takes one such request at a time, among others that are not. If it dies
too, that one is convicted, and ends before it takes a third worker along, and the other pictures of its call with it;
those beside it, which may yet have been the cause, come on trial. A request that gets past the point at which its
worker died is acquitted, so after an ordinary death, of a machine or a network, the trials are soon over. A worker that
speaks again has not died at all.
"""

from services.scheduler.request import Request
from services.scheduler.workers import Worker


def at_work(worker: Worker) -> list[Request]:
    """The requests that `worker`, which has died, may have died of.

    It may have been at work on what it was to prepare or to decode, or to run in any plan that it may have begun. A
    request that only stood by, prepared or preempted, is innocent.
    """
    planned = {request_id for plan in worker.outstanding for request_id in plan.until}
    residents = [residency.request for residency in worker.residents.values()]
    return [r for r in residents if r.status in ("preparing", "running", "decoding") or r.request_id in planned]


def blame(request: Request) -> None:
    """The worker that has the request died, perhaps of it."""
    request.died_on += (request.worker_id,)
    request.died_at_step = None if request.status == "decoding" else request.planned_step


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
