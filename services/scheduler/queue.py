"""The requests that wait for a worker.

Role: one queue a model, first in first out by arrival, and one bound over all of them. It owns the order of waiting;
it must not know workers or why a request waits (a new one and one whose worker was lost differ in nothing but place).
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

from services.scheduler.request import Request


def _number(request: Request) -> int:
    return request.number


class WaitingQueue:
    """Waiting requests by model, each model's in arrival order."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._by_model: dict[str, list[Request]] = {}
        self._length = 0
        self.work_s = 0.0  # seconds of one worker that all of them would take

    def __len__(self) -> int:
        return self._length

    def add(self, request: Request) -> None:
        """Queues `request` at the place that its arrival gives it."""
        insort(self._by_model.setdefault(request.request.model, []), request, key=_number)
        self._length += 1
        self.work_s += request.queued_work_s

    def remove(self, request: Request) -> None:
        """Takes `request` out, wherever it stands. Raises ValueError if it does not wait."""
        waiting = self._by_model.get(request.request.model, [])
        index = bisect_left(waiting, request.number, key=_number)
        if index == len(waiting) or waiting[index] is not request:
            raise ValueError(f"not waiting\n{request.tell()}")
        del waiting[index]
        if not waiting:
            del self._by_model[request.request.model]
        self._length -= 1
        # A sum of differences drifts; an empty queue has no work for certain.
        self.work_s = self.work_s - request.queued_work_s if self._length else 0.0

    def weigh(self, request: Request, work_s: float) -> None:
        """What `request`, which waits, adds to the queue's work has become known."""
        self.work_s += work_s - request.queued_work_s
        request.queued_work_s = work_s

    def waiting(self, model: str) -> Sequence[Request]:
        """The model's waiting requests, in their order. It is the queue's own list: look, and don't keep it."""
        return self._by_model.get(model, ())

    def position(self, request: Request) -> int:
        """Requests of its model that wait before it."""
        return bisect_left(self._by_model.get(request.request.model, []), request.number, key=_number)

    def models(self) -> dict[str, tuple[Request, ...]]:
        """A copy of everything that waits."""
        return {model: tuple(waiting) for model, waiting in self._by_model.items()}
