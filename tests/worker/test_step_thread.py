"""Plans on the step thread, with a runner that takes a step only when the test says so."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from common import messages as m
from common.errors import ErrorInfo
from services.worker import step_thread
from services.worker.runner import GroupOutcome
from services.worker.step_thread import Boundary, StepThread
from tests.worker.peers import group

DEADLINE_S = 20.0
FAULT = ErrorInfo("generation_failed", "as the test wanted")


class State:
    """A request without tensors."""

    def __init__(self, request_id: str, total_steps: int = 10, attempt: int = 1, step_index: int = 0) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.step_index = step_index
        self.total_steps = total_steps


class FakeRunner:
    """Each run of a group waits for a permit of the test."""

    def __init__(self) -> None:
        self.states: dict[str, State] = {}
        self.permits = threading.Semaphore(0)
        self.begun: queue.Queue[list[str]] = queue.Queue()  # the members of each run, as it begins
        self.fails: set[str] = set()
        self.late: list[tuple[State, ErrorInfo]] = []

    def on_thread(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def add(self, state: State) -> None:
        self.states[state.request_id] = state

    def get(self, request_id: str) -> State | None:
        return self.states.get(request_id)

    def remove(self, request_id: str) -> None:
        self.states.pop(request_id, None)

    def run_group(self, states: Sequence[State], given_up: Callable[[State], bool]) -> GroupOutcome:
        self.given_up = given_up
        self.begun.put([state.request_id for state in states])
        assert self.permits.acquire(timeout=DEADLINE_S), "the test gave no permit"
        outcome = GroupOutcome(rows=2 * len(states), tokens=100 * len(states))
        for state in states:
            if state.request_id in self.fails:
                self.remove(state.request_id)
                outcome.failed.append((state, FAULT))  # type: ignore[arg-type]
            else:
                state.step_index += 1
                outcome.advanced.append(state)  # type: ignore[arg-type]
        return outcome

    def settle(self) -> list[tuple[State, ErrorInfo]]:
        late, self.late = self.late, []
        for state, _ in late:
            self.remove(state.request_id)
        return late


class Bench:
    """The thread, and what it says."""

    def __init__(self) -> None:
        self.runner = FakeRunner()
        self.boundaries: queue.Queue[Boundary] = queue.Queue()
        self.crashes: queue.Queue[BaseException] = queue.Queue()
        self.thread = StepThread(self.runner, "worker-test", self.boundaries.put, self.crashes.put)
        self.thread.start()

    def plan(self, step_id: int, *groups: m.Group, **fields: Any) -> None:
        self.thread.submit(m.StepPlan("boot-1", step_id, groups, **fields))

    def in_step(self) -> list[str]:
        """Waits until a group runs; its members. It waits for its permit now."""
        return self.runner.begun.get(timeout=DEADLINE_S)

    def permit(self) -> m.StepResult:
        """Lets one group run and returns the result of its step."""
        self.runner.permits.release()
        return self.result()

    def result(self) -> m.StepResult:
        return self.boundaries.get(timeout=DEADLINE_S).result


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.runner.permits.release(1_000)
    assert bench.thread.stop(DEADLINE_S)
    assert bench.crashes.empty()


def steps(result: m.StepResult) -> dict[str, int]:
    return {progress.request_id: progress.step_index for progress in result.progress}


def test_runs_each_member_to_its_until_step_and_no_further(bench: Bench) -> None:
    bench.thread.add(State("a"))
    bench.thread.add(State("b", step_index=4))
    bench.plan(1, group(("a", 3), ("b", 6)))
    results = [bench.permit() for _ in range(3)]
    assert [steps(result) for result in results] == [{"a": 1, "b": 5}, {"a": 2, "b": 6}, {"a": 3}]
    assert [result.plan_done for result in results] == [False, False, True]
    assert {result.step_id for result in results} == {1}
    assert bench.thread.idle


def test_a_step_runs_each_group_once_and_times_each(bench: Bench) -> None:
    bench.thread.add(State("a"))
    bench.thread.add(State("b"))
    bench.plan(1, group(("a", 1)), group(("b", 1)))
    bench.runner.permits.release()
    result = bench.permit()
    assert steps(result) == {"a": 1, "b": 1}
    assert [(timing.requests, timing.rows, timing.tokens) for timing in result.timings] == [(1, 2, 100), (1, 2, 100)]


def test_a_plan_that_starts_after_the_current_one_waits_for_its_end(bench: Bench) -> None:
    bench.thread.add(State("a"))
    bench.thread.add(State("b"))
    bench.plan(1, group(("a", 2)))
    assert bench.in_step() == ["a"]
    bench.plan(2, group(("b", 1)), starts="after_current")
    results = [bench.permit() for _ in range(3)]
    assert [(result.step_id, steps(result)) for result in results] == [(1, {"a": 1}), (1, {"a": 2}), (2, {"b": 1})]
    assert [result.last_step_id for result in results] == [2, 2, 2]


def test_a_plan_that_starts_at_the_next_boundary_takes_over_there(bench: Bench) -> None:
    bench.thread.add(State("a"))
    bench.thread.add(State("b"))
    bench.plan(1, group(("a", 9)))
    assert bench.in_step() == ["a"]
    bench.plan(2, group(("b", 1)), starts="next_boundary")
    first, second = bench.permit(), bench.permit()
    assert (first.step_id, first.plan_done) == (1, False)
    assert (second.step_id, steps(second), second.plan_done) == (2, {"b": 1}, True)
    assert bench.runner.states["a"].step_index == 1


def test_a_newer_plan_replaces_the_one_that_is_pending(bench: Bench) -> None:
    bench.thread.add(State("a"))
    bench.plan(1, group(("a", 1)))
    assert bench.in_step() == ["a"]
    bench.plan(2, group(("a", 9)))
    bench.plan(3, group(("a", 2)))
    results = [bench.permit(), bench.permit()]
    assert [result.step_id for result in results] == [1, 3]
    assert results[1].plan_done
    assert bench.runner.states["a"].step_index == 2


def test_superseding_plans_never_run_a_request_too_far(bench: Bench) -> None:
    bench.thread.add(State("a"))
    for step_id in range(1, 6):
        bench.plan(step_id, group(("a", 3)), starts="next_boundary")
    results = []
    while not results or results[-1].step_id < 5 or not results[-1].plan_done:
        bench.runner.permits.release()
        results.append(bench.result())
    assert bench.runner.states["a"].step_index == 3


def test_a_member_that_is_not_here_is_skipped_and_reported(bench: Bench) -> None:
    bench.thread.add(State("a"))
    bench.plan(1, group(("a", 1), ("gone", 5)))
    result = bench.permit()
    assert (steps(result), result.skipped, result.plan_done) == ({"a": 1}, ("gone",), True)


def test_a_member_of_another_attempt_is_skipped(bench: Bench) -> None:
    bench.thread.add(State("a", attempt=2))
    bench.plan(1, group(("a", 1), attempt=1))
    result = bench.result()
    assert (result.skipped, result.progress, result.plan_done) == (("a",), (), True)


def test_a_plan_whose_members_are_all_gone_is_done_at_once(bench: Bench) -> None:
    bench.plan(1, group(("gone", 5)))
    result = bench.result()
    assert (result.plan_done, result.timings) == (True, ())
    assert bench.thread.idle


def test_a_plan_without_groups_stops_the_running_one(bench: Bench) -> None:
    bench.thread.add(State("a"))
    bench.plan(1, group(("a", 9)))
    assert bench.in_step() == ["a"]
    bench.plan(2, starts="next_boundary")
    bench.permit()
    result = bench.result()
    assert (result.step_id, result.plan_done) == (2, True)
    assert bench.thread.idle


def test_a_release_takes_effect_at_the_next_boundary(bench: Bench) -> None:
    bench.thread.add(State("a"))
    bench.thread.add(State("b"))
    bench.plan(1, group(("a", 2), ("b", 2)))
    assert bench.in_step() == ["a", "b"]
    bench.thread.release("a", 1)
    assert steps(bench.permit()) == {"a": 1, "b": 1}
    last = bench.permit()
    assert (steps(last), last.skipped, last.plan_done) == ({"b": 2}, ("a",), True)


def test_a_release_of_an_earlier_attempt_spares_the_later_one(bench: Bench) -> None:
    bench.thread.add(State("a", attempt=1))
    bench.thread.release("a", 1)
    bench.thread.add(State("a", attempt=2))
    bench.thread.release("a", 1)
    bench.plan(1, group(("a", 1), attempt=2))
    assert steps(bench.permit()) == {"a": 1}


def test_a_finished_request_leaves_and_is_not_called_skipped(bench: Bench) -> None:
    bench.thread.add(State("a", total_steps=1))
    bench.thread.add(State("b"))
    bench.plan(1, group(("a", 1), ("b", 2)))
    bench.runner.permits.release(2)
    first, second = (bench.boundaries.get(timeout=DEADLINE_S) for _ in range(2))
    assert [state.request_id for state in first.finished] == ["a"]
    assert "a" not in bench.runner.states
    assert (second.result.skipped, second.result.plan_done) == ((), True)


def test_a_plan_that_asks_for_more_steps_than_a_request_has_ends_with_its_last(bench: Bench) -> None:
    bench.thread.add(State("a", total_steps=1))
    bench.thread.add(State("b", total_steps=3))
    bench.plan(1, group(("a", 100), ("b", 3)))
    bench.runner.permits.release(3)
    boundaries = [bench.boundaries.get(timeout=DEADLINE_S) for _ in range(3)]
    assert [boundary.result.plan_done for boundary in boundaries] == [False, False, True]
    assert [state.request_id for boundary in boundaries for state in boundary.finished] == ["a", "b"]


def test_a_failed_request_is_reported_and_the_others_go_on(bench: Bench) -> None:
    bench.thread.add(State("a"))
    bench.thread.add(State("b"))
    bench.runner.fails.add("a")
    bench.plan(1, group(("a", 2), ("b", 2)))
    first, second = bench.permit(), bench.permit()
    assert first.failed == (m.Failure("a", 1, FAULT),)
    assert (steps(first), steps(second), second.plan_done) == ({"b": 1}, {"b": 2}, True)


def test_a_failure_that_is_known_late_is_reported_before_the_thread_rests(bench: Bench) -> None:
    state = State("a", total_steps=1)
    bench.thread.add(state)
    bench.runner.late = [(state, FAULT)]
    bench.plan(1, group(("a", 1)))
    bench.runner.permits.release()
    boundary = bench.boundaries.get(timeout=DEADLINE_S)
    assert boundary.result.failed == (m.Failure("a", 1, FAULT),)
    assert (boundary.finished, boundary.result.progress) == ((), ())


def test_a_new_epoch_lets_the_planned_steps_go_on(bench: Bench) -> None:
    bench.thread.add(State("a"))
    bench.plan(7, group(("a", 2)))
    assert bench.in_step() == ["a"]
    bench.thread.begin_epoch()
    first, second = bench.permit(), bench.permit()
    assert (first.last_step_id, second.plan_done) == (0, True)
    bench.plan(1, group(("a", 3)))
    assert steps(bench.permit()) == {"a": 3}


def test_stops_at_the_boundary_of_the_step_that_is_running(bench: Bench) -> None:
    bench.thread.add(State("a"))
    bench.plan(1, group(("a", 9)))
    assert bench.in_step() == ["a"]
    assert not bench.thread.stop(0.0)
    bench.permit()
    assert bench.thread.stop(DEADLINE_S)
    assert bench.runner.states["a"].step_index == 1


def test_a_fault_of_the_thread_itself_reaches_its_owner() -> None:
    bench = Bench()
    bench.thread.add(None)  # type: ignore[arg-type]
    assert isinstance(bench.crashes.get(timeout=DEADLINE_S), AttributeError)


def test_a_runner_in_a_long_step_can_ask_who_was_released_meanwhile(bench: Bench) -> None:
    a, b = State("a"), State("b", attempt=2)
    bench.thread.add(a)
    bench.thread.add(b)
    bench.plan(1, group(("a", 9)), group(("b", 9), attempt=2))
    assert bench.in_step() == ["a"]
    assert not bench.runner.given_up(a)
    bench.thread.release("a", 1)
    bench.thread.release("b", 1)
    assert bench.runner.given_up(a)
    assert not bench.runner.given_up(b)  # another attempt was meant
    bench.thread.stop(0.0)
    assert bench.runner.given_up(b)


def test_what_a_step_takes_includes_the_wait_for_the_device(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0

    def wait_for_the_device() -> list[Any]:
        nonlocal clock
        clock += 0.05  # launching the step took no time at all
        return []

    monkeypatch.setattr(step_thread.time, "perf_counter", lambda: clock)
    monkeypatch.setattr(bench.runner, "settle", wait_for_the_device)
    bench.thread.add(State("r1"))
    bench.plan(1, group(("r1", 1)))
    bench.plan(2, group(("r1", 2)))
    for _ in range(2):
        (timing,) = bench.permit().timings
        assert timing.seconds == pytest.approx(0.05)
