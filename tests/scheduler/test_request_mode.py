"""Plans for a worker in request mode, whose requests have one step: the whole call."""

from typing import Any

from common import messages as m
from tests import builders
from tests.scheduler.driver import WORKER, Driver


def driver(**hello: Any) -> Driver:
    """One worker in request mode, and a gateway."""
    driver = Driver()
    driver.worker(step_execution=False, profile=builders.profile(mixes=()), **hello)
    driver.gateway()
    return driver


def groups(sends: list[Any]) -> list[list[list[tuple[str, int]]]]:
    """Of each plan among these messages: its groups' members and their until_step."""
    plans = [send.message for send in sends if isinstance(send.message, m.StepPlan)]
    return [[[(r.request_id, r.until_step) for r in group.requests] for group in plan.groups] for plan in plans]


def test_a_call_begins_once_all_that_could_share_it_are_prepared() -> None:
    one = driver()
    assert groups(one.submit(*(builders.request(name, seed=i) for i, name in enumerate("abc")))) == [[]]
    assert groups(one.ready("a", total_steps=1)) == []
    assert groups(one.ready("b", total_steps=1)) == []
    assert groups(one.ready("c", total_steps=1)) == [[[("a", 1), ("b", 1), ("c", 1)]]]


def test_one_that_can_not_be_prepared_holds_nobody_up() -> None:
    one = driver()
    one.submit(builders.request("a"), builders.request("b"))
    one.ready("a", total_steps=1)
    error = m.ErrorInfo("invalid_request", "no")
    sends = one.handle(m.RequestDone(WORKER, "b", 1, "error", error=error))
    assert [group for group in groups(sends) if group] == [[[("a", 1)]]]


def test_what_comes_while_a_call_runs_is_planned_for_the_next() -> None:
    one = driver()
    one.submit(builders.request("a"))
    one.ready("a", total_steps=1)
    one.submit(builders.request("b"), builders.request("other", num_inference_steps=9))
    assert groups(one.ready("b", total_steps=1)) == []
    assert groups(one.ready("other", total_steps=1)) == [[[("b", 1)]]]


def test_work_is_counted_in_calls_by_their_denoise_steps() -> None:
    """A step is a whole call here, whose cost is that of a call with the default number of denoise steps."""
    one = driver(max_num_seqs=1, max_residents=1, cost=m.StepCost(floor_s=2.0, per_token_s=0.0))
    default = builders.profile().default_num_inference_steps
    one.submit(
        builders.request("a", num_inference_steps=default), builders.request("b", num_inference_steps=3 * default)
    )
    assert one.core.fleet.workers[WORKER].work_s == 2.0
    assert one.core.book.queue.work_s == 6.0
