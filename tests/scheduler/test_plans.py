"""Plans ahead: these events, then exactly these plans."""

from collections.abc import Sequence

import pytest

from common import messages as m
from common.errors import ErrorInfo
from services.scheduler.core import Send
from services.scheduler.policy import Candidate, Groups
from tests.builders import request
from tests.scheduler.driver import (
    BOOT,
    GATEWAY,
    WORKER,
    Driver,
    members,
    plans,
    resident,
    running,
    serving,
    to_gateway,
    updates,
)


def outline(sends: list[Send]) -> list[tuple[int, dict[str, int], str]]:
    """Step id, until_step of each member, and start, of each plan."""
    return [(plan.step_id, members(plan), plan.starts) for plan in plans(sends)]


def test_an_idle_worker_gets_one_step_and_the_next_one_with_it() -> None:
    driver = serving()
    asked = request("r1")
    driver.submit(asked)
    one = m.PlannedRequest("r1", 1, 1)
    two = m.PlannedRequest("r1", 1, 2)
    assert driver.ready("r1", last_step_id=2) == [
        Send(GATEWAY, m.RequestUpdate("r1", "ready", attempt=1, worker_id=WORKER, total_steps=4)),
        Send(WORKER, m.StepPlan(BOOT, 3, groups=(m.Group((one,)),))),
        Send(WORKER, m.StepPlan(BOOT, 4, groups=(m.Group((two,)),))),
        Send(GATEWAY, m.RequestUpdate("r1", "running", attempt=1, worker_id=WORKER, total_steps=4)),
    ]


def test_when_a_plan_is_done_the_next_but_one_is_sent() -> None:
    driver = running(request("r1"))
    assert outline(driver.result(3, {"r1": 1}, last=4)) == [(5, {"r1": 3}, "after_current")]
    assert outline(driver.result(4, {"r1": 2}, last=5)) == [(6, {"r1": 4}, "after_current")]
    assert outline(driver.result(5, {"r1": 3}, last=6)) == []
    assert outline(driver.result(6, {"r1": 4}, last=6)) == []
    assert driver.status("r1") == "decoding"


def test_a_plan_gives_as_many_steps_as_a_lease_has() -> None:
    driver = serving(lease_steps=4)
    driver.submit(request("r1", num_inference_steps=10))
    assert outline(driver.ready("r1")) == [(3, {"r1": 4}, "after_current"), (4, {"r1": 8}, "after_current")]
    for step in (1, 2, 3):
        assert outline(driver.result(3, {"r1": step}, done=False, last=4)) == []
    assert outline(driver.result(3, {"r1": 4}, last=4)) == [(5, {"r1": 10}, "after_current")]


def test_a_newcomer_replaces_the_pending_plan_and_joins_at_the_next_boundary() -> None:
    driver = running(request("r1", num_inference_steps=9))
    driver.submit(request("r2", num_inference_steps=9))
    # One step more than the replaced plan gave: the worker may have begun it already.
    assert outline(driver.ready("r2")) == [(6, {"r1": 3, "r2": 2}, "next_boundary")]


def test_a_newcomer_joins_in_the_middle_of_a_lease() -> None:
    driver = running(request("r1", num_inference_steps=20), lease_steps=4)
    driver.result(3, {"r1": 1}, done=False, last=4)
    driver.submit(request("r2", num_inference_steps=20))
    ((_, until, starts),) = outline(driver.ready("r2"))
    assert starts == "next_boundary"
    assert set(until) == {"r1", "r2"}


def test_a_replaced_plan_that_was_begun_is_taken_for_the_running_one() -> None:
    driver = running(request("r1", num_inference_steps=9))
    driver.submit(request("r2", num_inference_steps=9))
    driver.ready("r2")
    # Plan 5 only told the worker of r2; plan 6 takes it in. At its boundary the worker had heard of plan 4 only.
    assert outline(driver.result(3, {"r1": 1}, last=4)) == []
    assert [plan.step_id for plan in driver.known_worker().outstanding] == [4, 5, 6]
    assert driver.status("r2") == "ready"
    driver.result(4, {"r1": 2}, last=6)
    assert driver.known_worker().outstanding[0].step_id == 6
    assert driver.status("r2") == "running"


def test_a_place_that_a_running_member_leaves_is_given_away_in_advance() -> None:
    driver = Driver()
    driver.gateway()
    driver.worker(limits=m.WorkerLimits(max_num_seqs=2, max_residents=4))
    driver.submit(
        request("r1", num_inference_steps=1),
        request("r2", num_inference_steps=9),
        request("r3", num_inference_steps=9),
    )
    for name in ("r2", "r3", "r1"):
        sends = driver.ready(name)
    running_now, next_plan = plans(sends)
    assert members(running_now) == {"r1": 1, "r2": 1}
    assert members(next_plan) == {"r2": 2, "r3": 1}
    assert driver.statuses() == {"r1": "running", "r2": "running", "r3": "ready"}


def test_a_plan_that_was_superseded_unrun_strands_nobody() -> None:
    driver = Driver()
    driver.gateway()
    driver.worker(limits=m.WorkerLimits(max_num_seqs=2, max_residents=4))
    driver.submit(request("r1", num_inference_steps=1), request("r2", num_inference_steps=9))
    driver.ready("r2")
    first, second = plans(driver.ready("r1"))
    assert (members(first), members(second)) == ({"r1": 1, "r2": 1}, {"r2": 2})
    # The worker took the second plan before it had begun the first.
    ((_, until, _),) = outline(driver.result(second.step_id, {"r2": 1}, done=False))
    assert until["r1"] == 1


def test_new_requests_are_repeated_until_the_worker_has_confirmed_them() -> None:
    driver = serving()
    driver.submit(request("r1"))
    (plan,) = plans(driver.submit(request("r2")))
    assert [new.request.request_id for new in plan.new] == ["r1", "r2"]
    driver.ready("r1", last_step_id=plan.step_id - 1)
    (plan,) = plans(driver.submit(request("r3")))
    assert [new.request.request_id for new in plan.new] == ["r2", "r3"]


def test_a_plan_without_groups_is_sent_for_what_it_tells() -> None:
    driver = serving()
    driver.submit(request("r1"))
    (plan,) = plans(driver.abort("r1"))
    assert (plan.groups, plan.new) == ((), ())
    assert plan.released == (m.ReleasedRequest("r1", 1, "aborted"),)
    assert driver.known_worker().outstanding == []


def test_the_head_of_another_size_waits_for_the_group_to_end() -> None:
    driver = running(request("r1", num_inference_steps=2), request("r2", height=128), request("r3"))
    driver.result(driver.known_worker().outstanding[0].step_id, {"r1": 1})
    assert [set(plan.until) for plan in driver.known_worker().outstanding] == [{"r1"}, {"r2"}]


def test_a_finished_request_gives_its_room_on_the_worker_to_the_next() -> None:
    driver = Driver()
    driver.gateway()
    driver.worker(limits=m.WorkerLimits(max_num_seqs=1, max_residents=1))
    driver.submit(request("r1", num_inference_steps=1), request("r2"))
    driver.ready("r1")
    driver.result(driver.newest(), {"r1": 1})
    sends = driver.done("r1")
    assert updates(sends) == [("r1", "finished_completed"), ("r2", "preparing")]
    assert [new.request.request_id for new in plans(sends)[0].new] == ["r2"]


def test_a_failure_in_a_step_ends_that_request_alone() -> None:
    driver = running(request("r1"), request("r2"))
    error = ErrorInfo("non_finite", "NaN in the latents")
    step_id = driver.known_worker().outstanding[0].step_id
    sends = driver.result(step_id, {"r2": 1}, failed=(m.Failure("r1", 1, error),))
    assert (
        Send(
            GATEWAY,
            m.RequestUpdate("r1", "finished_error", attempt=1, worker_id=WORKER, total_steps=4, error=error),
        )
        in sends
    )
    assert driver.statuses() == {"r2": "running"}


def test_a_failure_outside_a_step_ends_the_request_with_the_reason_given() -> None:
    driver = serving()
    driver.submit(request("r1"))
    error = ErrorInfo("undelivered", "its gateway did not take it")
    sends = driver.done("r1", error=error)
    assert [x.error for x in to_gateway(sends)] == [error]


def test_a_member_that_is_not_on_the_worker_is_dispatched_again() -> None:
    driver = running(request("r1"))
    sends = driver.result(3, skipped=("r1",))
    assert updates(sends) == [("r1", "waiting"), ("r1", "preparing")]
    (plan,) = plans(sends)
    assert plan.new == (m.NewRequest(request("r1"), 2),)
    assert plan.released == (m.ReleasedRequest("r1", 1, "superseded"),)


def test_an_old_plan_cannot_have_skipped_a_new_attempt() -> None:
    driver = running(request("r1"))
    driver.result(3, skipped=("r1",), last=4)
    driver.ready("r1", attempt=2)
    driver.result(4, skipped=("r1",))
    driver.result(driver.known_worker().outstanding[0].step_id, {"r1": 1}, attempt=2, done=False)
    assert driver.status("r1") == "running"
    assert updates(driver.result(4, skipped=("r1",))) == []
    assert driver.status("r1") == "running"


def test_what_is_said_of_another_attempt_is_ignored() -> None:
    driver = serving()
    driver.submit(request("r1"))
    assert driver.ready("r1", attempt=2) == []
    assert driver.done("r1", attempt=2) == []
    driver.ready("r1")
    step_id = driver.newest()
    driver.result(step_id, {"r1": 1}, attempt=2, failed=(m.Failure("r1", 2, ErrorInfo("internal", "no")),))
    assert driver.core.book.live["r1"].step_index == 0


def test_progress_is_never_undone() -> None:
    driver = running(request("r1", num_inference_steps=9))
    driver.result(4, {"r1": 2}, last=4)
    driver.result(3, {"r1": 1}, last=4)
    assert driver.core.book.live["r1"].step_index == 2


def test_progress_past_the_end_is_ignored() -> None:
    driver = running(request("r1"))
    driver.result(3, {"r1": 9}, last=4)
    assert driver.core.book.live["r1"].step_index == 0


def test_the_worker_says_how_many_steps_there_are() -> None:
    driver = serving()
    driver.submit(request("r1", num_inference_steps=1))
    assert outline(driver.ready("r1", total_steps=2))[1][1] == {"r1": 2}


def test_a_request_that_starts_in_the_middle_goes_on_from_there() -> None:
    driver = serving()
    driver.submit(request("r1"))
    assert outline(driver.ready("r1", step_index=2))[0][1] == {"r1": 3}


def take_turns(candidates: Sequence[Candidate], limits: m.WorkerLimits) -> Groups:
    """A policy that lets those with most steps left run, in groups of one."""
    ready = sorted((c for c in candidates if c.ready), key=lambda c: -c.steps_left)
    return tuple((c.request_id,) for c in ready[: limits.max_num_seqs])


def test_what_a_plan_leaves_out_is_preempted_and_runs_again_when_it_is_back() -> None:
    driver = Driver(policy=take_turns)
    driver.gateway()
    driver.worker(limits=m.WorkerLimits(max_num_seqs=1, max_residents=4))
    driver.submit(request("r1", num_inference_steps=4), request("r2", num_inference_steps=3))
    driver.ready("r1")
    driver.ready("r2")
    seen = []
    for _ in range(20):
        plan = driver.known_worker().outstanding[0] if driver.known_worker().outstanding else None
        if plan is None:
            break
        (name,) = plan.until
        step = driver.core.book.live[name].step_index + 1
        sends = driver.result(plan.step_id, {name: step}, done=step >= plan.until[name])
        seen += [update for update in updates(sends) if update[1] in ("preempted", "running", "decoding")]
    assert ("r1", "preempted") in seen
    assert seen.index(("r1", "preempted")) < len(seen) - seen[::-1].index(("r1", "running"))
    assert driver.statuses() == {"r1": "decoding", "r2": "decoding"}


def test_groups_of_a_policy_are_sent_as_they_are() -> None:
    driver = Driver(policy=take_turns)
    driver.gateway()
    driver.worker()
    driver.submit(request("r1"), request("r2"))
    driver.ready("r1")
    driver.ready("r2")
    newest = driver.known_worker().outstanding[-1]
    assert len(newest.groups) == 2
    assert {r for group in newest.groups for r in group} == {"r1", "r2"}


@pytest.mark.parametrize("lease_steps", [1, 4])
def test_step_ids_rise_over_all_workers(lease_steps: int) -> None:
    driver = serving(lease_steps=lease_steps)
    sends = driver.worker("worker-b") + driver.submit(request("r1", num_inference_steps=9))
    sends += driver.submit(request("r2", num_inference_steps=9))
    sends += driver.ready("r1", driver.core.book.live["r1"].worker_id)
    sends += driver.ready("r2", driver.core.book.live["r2"].worker_id)
    ids = [x.message.step_id for x in sends if isinstance(x.message, m.StepPlan)]
    assert ids == sorted(set(ids))
    assert len(ids) >= 6


def test_a_resident_that_is_done_preparing_by_a_heartbeat_is_planned() -> None:
    driver = serving()
    driver.submit(request("r1"))
    assert outline(driver.beats(resident("r1")))[0][1] == {"r1": 1}
