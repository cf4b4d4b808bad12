"""The waiting queue."""

import pytest

from services.scheduler.queue import WaitingQueue
from services.scheduler.request import Request
from tests import builders


def waiting(number: int, model: str = "demo", work_s: float = 1.0) -> Request:
    return Request(builders.request(f"r{number}", model=model), number, queued_work_s=work_s)


def filled(*requests: Request) -> WaitingQueue:
    queue = WaitingQueue(max_waiting=3)
    for request in requests:
        queue.add(request)
    return queue


def test_each_model_has_its_own_head() -> None:
    queue = filled(a := waiting(1), b := waiting(2, "other"), waiting(3))
    assert queue.head("demo") is a
    assert queue.head("other") is b
    assert queue.head("unknown") is None


def test_one_that_returns_takes_its_old_place() -> None:
    queue = filled(waiting(3), waiting(5), a := waiting(1), b := waiting(4))
    assert queue.head("demo") is a
    assert queue.position(b) == 2


def test_the_bound_counts_all_models() -> None:
    queue = filled(waiting(1), waiting(2, "other"))
    assert len(queue) == 2


def test_removal_from_the_middle() -> None:
    queue = filled(waiting(1), b := waiting(2), c := waiting(3))
    queue.remove(b)
    assert len(queue) == 2
    assert queue.position(c) == 1


def test_removing_what_does_not_wait_is_an_error() -> None:
    queue = filled(waiting(1))
    with pytest.raises(ValueError, match="not waiting"):
        queue.remove(waiting(1))


def test_work_is_the_sum_of_what_waits_and_exactly_nothing_when_empty() -> None:
    queue = filled(a := waiting(1, work_s=0.1), b := waiting(2, work_s=0.2))
    assert queue.work_s == pytest.approx(0.3)
    queue.remove(a)
    queue.remove(b)
    assert queue.work_s == 0.0
