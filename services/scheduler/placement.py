"""Which worker gets the next waiting request.

Role: one pure choice among workers that have room. It must not know queues or plans.
"""

from collections.abc import Iterable

from services.scheduler.workers import Worker


def least_work(workers: Iterable[Worker]) -> Worker | None:
    """The worker with the fewest seconds of work left; among equals, the one that was known first."""
    return min(workers, key=lambda worker: (worker.work_s, worker.number), default=None)
