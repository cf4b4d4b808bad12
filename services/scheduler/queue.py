"""The requests that wait for a worker.

Role: two lines a model, each first in first out by arrival (those on trial apart from the others), and one bound over
all of them. It owns the order of waiting; it must not know workers or why a request waits (a new one and one whose
worker was lost differ in nothing but place).
"""

from bisect import bisect_left, insort

from services.scheduler.request import Request


def _number(request: Request) -> int:
    return request.number


class WaitingQueue:
    """Waiting requests by model, each model's in arrival order. A waiting request's being on trial must not change."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._lines: dict[tuple[str, bool], list[Request]] = {}  # by model and being on trial; none is empty
        self._length = 0
        self.work_s = 0.0  # seconds of one worker that all of them would take

    def __len__(self) -> int:
        return self._length

    def add(self, request: Request) -> None:
        """Queues `request` at the place that its arrival gives it."""
        insort(self._lines.setdefault(_line(request), []), request, key=_number)
        self._length += 1
        self.work_s += request.queued_work_s

    def remove(self, request: Request) -> None:
        """Takes `request` out, wherever it stands. Raises ValueError if it does not wait."""
        waiting = self._lines.get(_line(request), [])
        index = bisect_left(waiting, request.number, key=_number)
        if index == len(waiting) or waiting[index] is not request:
            raise ValueError(f"not waiting\n{request.tell()}")
        del waiting[index]
        if not waiting:
            del self._lines[_line(request)]
        self._length -= 1
        # A sum of differences drifts; an empty queue has no work for certain.
        self.work_s = self.work_s - request.queued_work_s if self._length else 0.0

    def weigh(self, request: Request, work_s: float) -> None:
        """What `request`, which waits, adds to the queue's work has become known."""
        self.work_s += work_s - request.queued_work_s
        request.queued_work_s = work_s

    def head(self, model: str, on_trial: bool = False) -> Request | None:
        """The first in one of the model's lines."""
        waiting = self._lines.get((model, on_trial))
        return waiting[0] if waiting else None

    def position(self, request: Request) -> int:
        """Requests of its model that came before it and wait."""
        lines = (self._lines.get((request.request.model, on_trial), []) for on_trial in (False, True))
        return sum(bisect_left(waiting, request.number, key=_number) for waiting in lines)

    def waiting(self, model: str) -> list[Request]:
        """A copy of all of a model's that wait, in arrival order."""
        both = self._lines.get((model, False), []) + self._lines.get((model, True), [])
        return sorted(both, key=_number)

    def models(self) -> dict[str, tuple[Request, ...]]:
        """A copy of everything that waits."""
        return {model: tuple(self.waiting(model)) for model in dict.fromkeys(model for model, _ in self._lines)}


def _line(request: Request) -> tuple[str, bool]:
    return request.request.model, request.on_trial
