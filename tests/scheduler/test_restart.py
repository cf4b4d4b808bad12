"""A scheduler that has started again finds what runs: these events, in either order, then exactly these messages."""

from typing import Any

import pytest

from common import messages as m
from common.errors import ErrorInfo
from common.params import DiffusionRequest
from services.scheduler.core import Send
from tests.builders import request
from tests.scheduler.driver import (
    BOOT,
    GATEWAY,
    WORKER,
    Driver,
    members,
    plans,
    resident,
    to_gateway,
    updates,
)

OTHER = "worker-b"
WINDOW_S = 5.0
LIMITS = m.WorkerLimits(max_num_seqs=2, max_residents=2)


def restarted(**core: Any) -> Driver:
    """A core that a gateway has found. Nobody is lost in the time that these tests take."""
    driver = Driver(**{"reconcile_s": WINDOW_S, "suspect_after_s": 100.0, "lost_after_s": 100.0} | core)
    driver.gateway()
    return driver


def resubmit(
    driver: Driver, *requests: DiffusionRequest, worker_id: str = WORKER, attempt: int = 1, step: int = 0, **claim: Any
) -> list[Send]:
    """The gateway submits again what it last heard to be there."""
    claims = tuple(m.RequestClaim(r.request_id, worker_id, attempt, step, **claim) for r in requests)
    return driver.handle(m.SubmitRequests(GATEWAY, requests, claims))


def new_in(sends: list[Send], worker_id: str = WORKER) -> list[tuple[str, int]]:
    """Requests and attempts that a worker is told of."""
    return [(new.request.request_id, new.attempt) for plan in plans(sends, worker_id) for new in plan.new]


def released_in(sends: list[Send], worker_id: str = WORKER) -> list[tuple[str, int]]:
    return [(x.request_id, x.attempt) for plan in plans(sends, worker_id) for x in plan.released]


@pytest.mark.parametrize("worker_first", [True, False])
def test_a_request_that_its_worker_still_holds_goes_on_at_the_step_that_it_has_reached(worker_first: bool) -> None:
    driver = restarted()
    asked = request("r1", num_inference_steps=9)
    held = resident("r1", step=5, total=9, attempt=2)
    if worker_first:
        driver.worker(residents=(held,))
        sends = resubmit(driver, asked, attempt=2, step=4)
    else:
        resubmit(driver, asked, attempt=2, step=4)
        sends = driver.worker(residents=(held,))
    live = driver.core.book.live["r1"]
    assert (live.worker_id, live.attempt, live.status, live.step_index) == (WORKER, 2, "running", 5)
    assert members(plans(sends)[0]) == {"r1": 6}
    assert [x.step_index for x in to_gateway(sends) if isinstance(x, m.RequestUpdate)][-1] == 5
    assert live.dispatches == 0
    driver.result(driver.newest(), {"r1": 6}, attempt=2)
    assert driver.core.book.live["r1"].step_index == 6


def test_all_that_a_worker_held_goes_on_in_its_order() -> None:
    driver = restarted()
    names = ("r1", "r2", "r3")
    resubmit(driver, *(request(name) for name in reversed(names)))
    sends = driver.worker(residents=(resident("r1", step=2), resident("r2", step=1), resident("r3", "preparing")))
    assert list(driver.known_worker().residents) == list(names)
    assert driver.statuses() == {"r3": "preparing", "r2": "running", "r1": "running"}
    assert members(plans(sends)[0]) == {"r1": 3, "r2": 2}
    driver.ready("r3")
    assert driver.status("r3") in ("ready", "running")


@pytest.mark.parametrize("worker_first", [True, False])
def test_a_finished_picture_that_awaits_its_acknowledgement_is_not_drawn_again(worker_first: bool) -> None:
    driver = restarted()
    held = resident("r1", "decoding", step=4)
    if worker_first:
        sends = driver.worker(residents=(held,)) + resubmit(driver, request("r1"), step=4)
    else:
        sends = resubmit(driver, request("r1"), step=4) + driver.worker(residents=(held,))
    assert driver.status("r1") == "decoding"
    assert not any(plan.groups for plan in plans(sends))
    assert updates(driver.done("r1")) == [("r1", "finished_completed")]


def test_a_picture_acknowledged_before_its_gateway_asked_again_is_not_drawn_again() -> None:
    driver = restarted()
    driver.worker(residents=(resident("r1", "decoding", step=4),))
    assert driver.done("r1") == []
    sends = resubmit(driver, request("r1"), step=4)
    assert [type(send.message) for send in sends] == [m.RequestUpdate]
    assert updates(sends) == [("r1", "finished_completed")]
    assert driver.core.book.live == {}


def test_a_failure_before_its_gateway_asked_again_may_be_of_an_attempt_that_counts_no_more() -> None:
    driver = restarted()
    driver.worker(residents=(resident("r1", step=2),))
    driver.done("r1", error=ErrorInfo("non_finite", "NaN"))
    assert updates(resubmit(driver, request("r1"), worker_id=OTHER, attempt=2)) == [("r1", "waiting")]
    driver.worker(OTHER, residents=(resident("r1", step=1, attempt=2),))
    assert driver.status("r1") == "running"


def test_a_request_is_held_for_its_worker_and_its_gateway_told_what_it_said_itself() -> None:
    driver = restarted()
    driver.worker(OTHER)
    sends = resubmit(driver, request("r1"), step=3)
    (update,) = to_gateway(sends)
    assert (update.status, update.worker_id, update.attempt, update.step_index) == ("waiting", WORKER, 1, 3)
    assert plans(sends, OTHER) == []
    assert len(driver.core.book.queue) == 0


def test_a_request_whose_worker_does_not_come_starts_over_elsewhere() -> None:
    driver = restarted()
    driver.worker(OTHER)
    resubmit(driver, request("r1"), step=3)
    assert driver.tick(WINDOW_S - 0.1) == []
    assert driver.core.next_deadline() == WINDOW_S
    sends = driver.tick(0.1)
    assert new_in(sends, OTHER) == [("r1", 2)]
    assert updates(sends) == [("r1", "waiting"), ("r1", "preparing")]


@pytest.mark.parametrize("worker_first", [True, False])
def test_a_request_that_its_worker_holds_no_more_is_dispatched_without_delay(worker_first: bool) -> None:
    driver = restarted()
    if worker_first:
        driver.worker()
        sends = resubmit(driver, request("r1"), step=3)
    else:
        resubmit(driver, request("r1"), step=3)
        sends = driver.worker()
    assert new_in(sends) == [("r1", 2)]


def test_a_request_that_waited_and_a_new_one_wait_for_nobody() -> None:
    driver = restarted()
    driver.worker(OTHER)
    resubmit(driver, request("held"), step=3)
    assert new_in(resubmit(driver, request("waited"), worker_id="", attempt=0), OTHER) == [("waited", 1)]
    assert ("new", 1) in new_in(driver.submit(request("new")), OTHER)


def test_residents_that_no_gateway_asks_for_are_kept_for_a_while_and_then_released() -> None:
    driver = restarted()
    residents = (resident("r1", step=2), resident("r2", step=1))
    driver.worker(residents=residents, limits=LIMITS)
    assert driver.submit(request("r3")) == [Send(GATEWAY, m.RequestUpdate("r3", "waiting"))]  # it is full
    driver.now = WINDOW_S - 0.1
    assert driver.beats(*residents) == []
    sends = driver.tick(0.1)
    assert released_in(sends) == [("r1", 1), ("r2", 1)]
    assert new_in(sends) == [("r3", 1)]
    assert driver.known_worker().unclaimed == {}


def test_an_unclaimed_resident_that_is_gone_by_the_next_heartbeat_is_forgotten() -> None:
    driver = restarted()
    driver.worker(residents=(resident("r1", step=2),), limits=LIMITS)
    driver.beats()
    assert driver.known_worker().unclaimed == {}
    assert new_in(resubmit(driver, request("r1"), step=2)) == [("r1", 2)]


def test_what_a_lost_worker_held_unclaimed_is_forgotten_with_it() -> None:
    driver = restarted(suspect_after_s=1.0, lost_after_s=2.0)
    driver.worker(residents=(resident("r1", step=2),))
    driver.tick(1.5)
    driver.gateway_beats()
    driver.tick(0.5)
    assert driver.core.fleet.workers == {}
    driver.core.validate()
    assert updates(resubmit(driver, request("r1"), step=2)) == [("r1", "waiting")]


# Two that hold the same

CASES = {
    "the highest attempt": (resident("r1", step=8, total=9, attempt=1), resident("r1", step=2, total=9, attempt=2)),
    "most steps": (resident("r1", step=2, total=9, attempt=2), resident("r1", step=3, total=9, attempt=2)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order", [("gateway", "loser", "winner"), ("loser", "gateway", "winner")])
@pytest.mark.parametrize("swapped", [True, False])
def test_of_two_that_hold_a_request_one_counts_and_the_other_is_released(
    case: str, order: tuple[str, ...], swapped: bool
) -> None:
    loser, winner = CASES[case]
    driver = restarted()
    sends: list[Send] = []
    for who in reversed(order) if swapped else order:
        if who == "gateway":
            sends += resubmit(driver, request("r1", num_inference_steps=9), worker_id="worker-gone", step=1)
        else:
            worker_id, held = (WORKER, winner) if who == "winner" else (OTHER, loser)
            sends += driver.worker(worker_id, residents=(held,))
    live = driver.core.book.live["r1"]
    assert (live.worker_id, live.attempt, live.step_index) == (WORKER, winner.attempt, winner.step_index)
    assert released_in(sends, OTHER) == [("r1", loser.attempt)]
    assert released_in(sends) == []
    # The loser says until it has heard that it still holds it.
    driver.beats(loser, worker_id=OTHER, last=0, idle=False)
    assert driver.core.book.live["r1"].worker_id == WORKER


def test_an_attempt_below_the_one_that_the_gateway_knows_is_not_taken_up() -> None:
    driver = restarted()
    resubmit(driver, request("r1"), worker_id=OTHER, attempt=2)
    assert released_in(driver.worker(residents=(resident("r1", step=3, attempt=1),))) == [("r1", 1)]
    assert driver.status("r1") == "waiting"


def test_a_dispatch_that_its_gateway_had_not_heard_of_yet_goes_on_where_it_was() -> None:
    driver = restarted()
    driver.worker(OTHER)
    driver.submit(request("r1"))  # says nothing of a worker
    driver.ready("r1", worker_id=OTHER)
    sends = driver.worker(residents=(resident("r1", step=2),))
    assert driver.core.book.live["r1"].worker_id == WORKER
    assert released_in(sends, OTHER) == [("r1", 1)]
    assert members(plans(sends)[0]) == {"r1": 3}


# Bounds and ends


def test_what_was_accepted_once_is_not_refused_for_want_of_room() -> None:
    driver = restarted(max_queue=1)
    driver.worker(residents=(resident("r2", step=1), resident("r3", step=1)), limits=LIMITS)
    driver.submit(request("r1"))
    assert ("r2", "running") in updates(resubmit(driver, request("r2"), step=1))
    assert ("r3", "running") in updates(driver.submit(request("r3")))  # its gateway had heard nothing of it yet
    (refusal,) = to_gateway(driver.submit(request("r4")))
    assert refusal.error.code == "queue_full"


def test_a_call_of_which_one_request_was_accepted_was_accepted_as_a_whole() -> None:
    driver = restarted(max_queue=1)
    claim = m.RequestClaim("r1", worker_id="", attempt=0, step_index=0)  # what was said of the other was lost
    sends = driver.handle(m.SubmitRequests(GATEWAY, (request("r1"), request("r2")), (claim,)))
    assert updates(sends) == [("r1", "waiting"), ("r2", "waiting")]
    driver.tick(WINDOW_S)
    assert driver.statuses() == {"r1": "waiting", "r2": "waiting"}


def test_what_was_accepted_once_outlives_the_time_in_which_workers_say_hello() -> None:
    driver = restarted()
    resubmit(driver, request("ran"), step=3)
    resubmit(driver, request("waited"), worker_id="", attempt=0)
    driver.submit(request("new"))
    driver.tick(WINDOW_S)
    assert driver.statuses() == {"ran": "waiting", "waited": "waiting"}
    assert driver.core.book.finished.get("new").error == ErrorInfo(
        "no_worker", "no worker serves the model 'demo' at present"
    )
    assert new_in(driver.worker()) == [("ran", 2), ("waited", 1)]


def test_a_held_request_can_be_aborted_and_its_resident_is_released() -> None:
    driver = restarted()
    resubmit(driver, request("r1"), step=3)
    assert updates(driver.abort("r1")) == [("r1", "finished_aborted")]
    assert driver.core.book.held == {}
    assert released_in(driver.worker(residents=(resident("r1", step=3),))) == [("r1", 1)]


def test_a_resident_of_another_model_is_not_taken_for_the_request() -> None:
    driver = restarted()
    driver.worker(residents=(resident("r1", step=2),))
    sends = resubmit(driver, request("r1", model="another"), step=2)
    assert released_in(sends) == [("r1", 1)]
    assert driver.status("r1") == "waiting"


def test_a_worker_that_was_full_already_is_given_nothing_more() -> None:
    driver = restarted()
    driver.worker(limits=LIMITS)
    driver.submit(request("r1"), request("r2"), request("r3"))
    driver.worker(OTHER, limits=LIMITS)
    driver.submit(request("r4"))
    assert driver.core.book.live["r3"].worker_id == OTHER
    # It comes up with one that it can't have, beside what it was given.
    sends = driver.beats(resident("r4", step=3, attempt=5), last=0)
    assert released_in(sends) == [("r4", 5)]
    assert driver.core.book.live["r4"].worker_id == OTHER


# Old words


def test_a_word_that_was_too_old_is_put_right_when_the_worker_has_the_plan() -> None:
    driver = restarted()
    resubmit(driver, request("r1"), step=3)
    sends = driver.worker(residents=(resident("r1", step=3),))
    assert new_in(sends) == []
    driver.beats(last=0)
    assert driver.status("r1") == "running"
    assert new_in(driver.beats()) == [("r1", 2)]


def test_a_hello_that_comes_twice_changes_nothing() -> None:
    driver = restarted()
    resubmit(driver, request("r1", num_inference_steps=9), step=3)
    driver.worker(residents=(resident("r1", step=3, total=9),))
    driver.result(driver.newest(), {"r1": 4}, done=False)
    sends = driver.worker(residents=(resident("r1", step=3, total=9),))
    assert driver.core.book.live["r1"].step_index == 4
    assert members(plans(sends)[0]) == {"r1": 5}


def test_what_a_worker_has_been_told_to_forget_is_not_taken_up_from_its_older_word() -> None:
    driver = Driver(reconcile_s=WINDOW_S)
    driver.gateway()
    driver.worker()
    driver.submit(request("r1", num_inference_steps=9))
    (first, *_) = plans(driver.ready("r1"))
    driver.handle(m.WorkerDraining(WORKER, BOOT))  # so that it is not given the request again at once
    before = driver.newest()
    assert released_in(driver.result(first.step_id, skipped=("r1",), last=before)) == [("r1", 1)]
    driver.beats(resident("r1", step=3, total=9), last=before, idle=False)
    assert driver.statuses() == {"r1": "waiting"}


def test_a_lost_worker_that_returns_goes_on_with_what_still_waits() -> None:
    driver = Driver(reconcile_s=WINDOW_S)
    driver.gateway()
    driver.worker()
    driver.submit(request("r1", num_inference_steps=9))
    driver.ready("r1")
    driver.result(driver.newest() - 1, {"r1": 1}, done=False)
    driver.tick(4.0)
    driver.gateway_beats()
    driver.tick(1.0)
    assert driver.status("r1") == "waiting"
    sends = driver.worker(residents=(resident("r1", step=2, total=9),), last_step_id=driver.newest())
    live = driver.core.book.live["r1"]
    assert (live.status, live.attempt, live.step_index) == ("running", 1, 2)
    assert members(plans(sends)[0]) == {"r1": 3}
    assert live.died_on == ()


def test_what_is_held_counts_in_the_queues_bound() -> None:
    driver = restarted(max_queue=4)
    driver.worker(OTHER, limits=m.WorkerLimits(max_num_seqs=1, max_residents=1))
    driver.submit(request("busy"))
    resubmit(driver, *(request(f"old{number}") for number in range(3)), step=3)
    assert len(driver.core.book.held[WORKER]) == 3
    (refused, _) = to_gateway(driver.submit(request("new1"), request("new2")))
    assert refused.error is not None
    assert (refused.error.code, refused.error.message) == ("queue_full", "the queue is full: 3 of 4 requests wait")


def test_work_that_came_before_any_worker_is_weighed_when_one_says_hello() -> None:
    driver = restarted(max_queue=3)
    asked = [request(f"r{number}", num_inference_steps=100) for number in range(4)]
    resubmit(driver, *asked[:2], worker_id="", attempt=0)
    resubmit(driver, asked[2])
    driver.worker(limits=m.WorkerLimits(max_num_seqs=1, max_residents=1))
    each_s = driver.known_worker().work_s
    assert each_s > 0
    assert driver.core.book.queue.work_s == pytest.approx(2 * each_s)
    (refused, _) = to_gateway(driver.submit(request("new1"), request("new2")))
    assert refused.retry_after_s == pytest.approx(max(2 * each_s, 1.0))


def test_the_gateway_hears_of_a_request_that_is_found_while_it_is_being_prepared() -> None:
    driver = restarted()
    driver.worker(residents=(resident("r1", "preparing", attempt=3),))
    told = to_gateway(resubmit(driver, request("r1"), attempt=2))
    assert [(x.status, x.worker_id, x.attempt) for x in told if x.status == "preparing"] == [("preparing", WORKER, 3)]


def test_a_picture_of_another_attempt_does_not_end_what_is_unclaimed() -> None:
    driver = restarted()
    driver.worker(residents=(resident("r1", step=2, attempt=2),))
    driver.done("r1", attempt=1)
    sends = resubmit(driver, request("r1"), attempt=2)
    assert driver.status("r1") == "running"
    assert new_in(sends) == []


def test_a_held_request_has_no_place_in_the_queue() -> None:
    driver = restarted()
    driver.worker(OTHER, limits=m.WorkerLimits(max_num_seqs=1, max_residents=1))
    driver.submit(request("busy"), request("waits"))
    (told,) = [x for x in to_gateway(resubmit(driver, request("r1"), step=4)) if x.request_id == "r1"]
    assert (told.status, told.worker_id, told.step_index, told.queue_position) == ("waiting", WORKER, 4, 0)
