"""Submission, dispatch and abort: these events, then exactly these messages."""

import pytest

from common import messages as m
from common.errors import ErrorInfo
from common.params import DataHome, DiffusionRequest
from services.scheduler.core import Send
from tests.builders import HOME, profile, request, worker_hello
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

OTHER = "gateway-other"


def requests(*names: str) -> list[DiffusionRequest]:
    return [request(name) for name in names]


def test_a_request_is_queued_and_dispatched_to_a_worker_with_room() -> None:
    driver = serving()
    asked = request("r1")
    assert driver.submit(asked) == [
        Send(GATEWAY, m.RequestUpdate("r1", "waiting")),
        Send(GATEWAY, m.RequestUpdate("r1", "preparing", attempt=1, worker_id=WORKER)),
        Send(WORKER, m.StepPlan(BOOT, 2, new=(m.NewRequest(asked, 1),))),
    ]


def test_what_finds_no_room_waits_and_is_told_its_place() -> None:
    driver = Driver()
    driver.gateway()
    driver.worker(limits=m.WorkerLimits(max_num_seqs=1, max_residents=1))
    sends = driver.submit(*requests("r1", "r2", "r3"))
    positions = {x.request_id: x.queue_position for x in to_gateway(sends) if x.status == "waiting"}
    assert positions == {"r1": 0, "r2": 1, "r3": 2}
    assert driver.statuses() == {"r1": "preparing", "r2": "waiting", "r3": "waiting"}


def test_a_place_that_becomes_free_goes_to_the_head_of_the_queue() -> None:
    driver = Driver()
    driver.gateway()
    driver.worker(limits=m.WorkerLimits(max_num_seqs=1, max_residents=1))
    driver.submit(*requests("r1", "r2", "r3"))
    (plan,) = plans(driver.abort("r1"))
    assert [new.request.request_id for new in plan.new] == ["r2"]


def test_a_request_goes_to_the_worker_with_the_least_work_left() -> None:
    driver = serving()
    driver.worker("worker-b")
    driver.submit(request("r1", num_inference_steps=10))
    driver.submit(request("r2", num_inference_steps=3))
    driver.submit(request("r3", num_inference_steps=3))
    driver.submit(request("r4", num_inference_steps=3))
    driver.submit(request("r5", num_inference_steps=3))
    placed = {r.request_id: r.worker_id for r in driver.core.book.live.values()}
    assert placed == {"r1": WORKER, "r2": "worker-b", "r3": "worker-b", "r4": "worker-b", "r5": "worker-b"}


def test_work_left_is_seconds_not_requests() -> None:
    driver = serving()
    driver.handle(worker_hello("worker-slow", scheduler_boot_id=BOOT, cost=m.StepCost(floor_s=0.02, per_token_s=1e-2)))
    driver.submit(request("r1"))
    driver.submit(request("r2"))
    driver.submit(request("r3"))
    assert driver.core.book.live["r2"].worker_id == "worker-slow"
    assert driver.core.book.live["r3"].worker_id == WORKER


def test_steps_that_are_done_are_no_work_any_more() -> None:
    driver = running(request("r1", num_inference_steps=8))
    before = driver.known_worker().work_s
    driver.result(4, {"r1": 2}, last=4)
    assert driver.known_worker().work_s == pytest.approx(before * 6 / 8)


def test_over_the_bound_the_whole_call_is_refused_and_not_remembered() -> None:
    driver = Driver(max_queue=2)
    driver.gateway()
    driver.worker(limits=m.WorkerLimits(max_num_seqs=1, max_residents=1))
    driver.submit(request("r1"))
    driver.submit(request("r2"))
    sends = driver.submit(*requests("r3", "r4"))
    full = ErrorInfo("queue_full", "the queue is full: 1 of 2 requests wait")
    assert sends == [
        Send(GATEWAY, m.RequestUpdate("r3", "finished_error", error=full, retry_after_s=1.0)),
        Send(GATEWAY, m.RequestUpdate("r4", "finished_error", error=full, retry_after_s=1.0)),
    ]
    assert updates(driver.submit(request("r3"))) == [("r3", "waiting")]


def test_what_an_earlier_epoch_accepted_is_not_refused_for_want_of_room_or_of_a_worker() -> None:
    driver = Driver(max_queue=1)
    driver.gateway()
    claims = tuple(m.RequestClaim(each, "", 0, 0) for each in ("r1", "r2", "r3"))
    sends = driver.handle(m.SubmitRequests(GATEWAY, requests("r1", "r2", "r3"), claims))
    assert updates(sends) == [("r1", "waiting"), ("r2", "waiting"), ("r3", "waiting")]


def test_a_call_that_no_queue_could_ever_hold_is_not_to_be_tried_again() -> None:
    driver = serving(max_queue=2)
    refusals = to_gateway(driver.submit(*requests("r1", "r2", "r3")))
    assert [(each.error.code, each.error.param, each.retry_after_s) for each in refusals if each.error] == [
        ("invalid_request", "n", None)
    ] * 3


def test_running_requests_do_not_count_in_the_queue() -> None:
    driver = serving(max_queue=2)
    driver.submit(*requests("r1", "r2"))
    assert updates(driver.submit(*requests("r3", "r4")))[:2] == [("r3", "waiting"), ("r4", "waiting")]


def test_a_refusal_says_when_to_try_again_by_the_work_that_waits() -> None:
    driver = Driver(max_queue=1)
    driver.gateway()
    driver.worker(limits=m.WorkerLimits(max_num_seqs=1, max_residents=1), cost=m.StepCost(floor_s=0.5, per_token_s=0.0))
    driver.submit(request("r1"))
    driver.submit(request("r2", num_inference_steps=20))
    (refusal,) = to_gateway(driver.submit(request("r3")))
    assert refusal.retry_after_s == pytest.approx(10.0)


def test_a_model_that_no_worker_ever_served_is_not_found() -> None:
    driver = serving()
    (refusal,) = to_gateway(driver.submit(request("r1", model="unknown")))
    assert (refusal.status, refusal.error.code) == ("finished_error", "model_not_found")


def test_a_model_whose_workers_are_all_gone_has_no_worker() -> None:
    driver = serving()
    driver.handle(m.WorkerDraining(WORKER, BOOT, leaving=True))
    (refusal,) = to_gateway(driver.submit(request("r1")))
    assert (refusal.error.code, refusal.retry_after_s) == ("no_worker", 1.0)
    driver.worker("worker-b")
    assert driver.submit(request("r1"))
    assert driver.status("r1") == "preparing"


def test_shortly_after_the_start_a_request_waits_for_a_worker_that_has_not_said_hello_yet() -> None:
    driver = Driver(reconcile_s=5.0)
    driver.gateway()
    assert updates(driver.submit(request("r1"))) == [("r1", "waiting")]
    assert [new.request.request_id for plan in plans(driver.worker()) for new in plan.new] == ["r1"]


def test_when_no_worker_said_hello_in_time_the_request_ends_and_may_be_tried_again() -> None:
    driver = Driver(reconcile_s=2.0)
    driver.gateway()
    driver.submit(request("r1"))
    assert driver.core.next_deadline() == 2.0
    (end,) = to_gateway(driver.tick(2.0))
    assert (end.status, end.error and end.error.code) == ("finished_error", "no_worker")
    (refusal,) = to_gateway(driver.submit(request("r2")))
    assert refusal.error is not None
    assert refusal.error.code == "model_not_found"


def test_one_bad_request_refuses_its_whole_call() -> None:
    driver = serving()
    sends = driver.submit(request("r1"), request("r2", model="unknown"))
    assert updates(sends) == [("r1", "finished_error"), ("r2", "finished_error")]
    assert driver.statuses() == {}


def test_a_live_request_submitted_again_is_answered_with_where_it_stands() -> None:
    driver = running(request("r1"))
    driver.result(4, {"r1": 1}, last=4)
    assert driver.submit(request("r1")) == [
        Send(GATEWAY, m.RequestUpdate("r1", "running", attempt=1, worker_id=WORKER, step_index=1, total_steps=4))
    ]


def test_a_waiting_request_submitted_again_is_told_its_new_place() -> None:
    driver = Driver()
    driver.gateway()
    driver.worker(limits=m.WorkerLimits(max_num_seqs=1, max_residents=1))
    driver.submit(*requests("r1", "r2", "r3"))
    driver.abort("r2")
    assert driver.submit(request("r3")) == [Send(GATEWAY, m.RequestUpdate("r3", "waiting", queue_position=0))]


def test_a_finished_request_submitted_again_is_answered_with_its_end() -> None:
    driver = serving()
    driver.submit(request("r1"))
    last = to_gateway(driver.done("r1", error=ErrorInfo("generation_failed", "no")))
    assert to_gateway(driver.submit(request("r1"))) == last
    assert driver.statuses() == {}


def test_known_and_new_requests_may_come_in_one_call() -> None:
    driver = serving(max_queue=1)
    driver.submit(request("r1"))
    assert updates(driver.submit(*requests("r1", "r2")))[:2] == [("r1", "preparing"), ("r2", "waiting")]


def test_finished_requests_are_forgotten_after_a_time() -> None:
    driver = serving(finished_for_s=10.0, lost_after_s=1000.0, suspect_after_s=900.0)
    driver.submit(request("r1"))
    driver.done("r1", error=ErrorInfo("generation_failed", "no"))
    driver.now = 9.9
    assert updates(driver.submit(request("r1"))) == [("r1", "finished_error")]
    driver.now = 10.0
    assert updates(driver.submit(request("r1"))) == [("r1", "waiting"), ("r1", "preparing")]


def test_only_so_many_finished_requests_are_remembered() -> None:
    driver = serving(max_finished=2)
    for name in ("r1", "r2", "r3"):
        driver.submit(request(name))
        driver.done(name, error=ErrorInfo("generation_failed", "no"))
    assert [name in driver.core.book.finished for name in ("r1", "r2", "r3")] == [False, True, True]


def test_a_request_of_another_gateway_is_refused() -> None:
    driver = serving()
    driver.gateway(OTHER)
    (refusal,) = to_gateway(driver.submit(request("r1"), gateway_id=OTHER), OTHER)
    assert refusal.error.code == "invalid_request"


def test_a_request_cannot_be_taken_over_by_its_id() -> None:
    driver = serving()
    driver.gateway(OTHER)
    driver.submit(request("r1"))
    stolen = request("r1", home=DataHome(OTHER, "tcp://127.0.0.1:2"))
    sends = driver.submit(stolen, gateway_id=OTHER)
    assert [x.error.code for x in to_gateway(sends, OTHER)] == ["invalid_request"]
    assert driver.core.book.live["r1"].request.home == HOME


def test_a_claimed_request_is_accepted_and_its_next_attempt_is_a_later_one() -> None:
    driver = Driver()
    driver.gateway()
    claim = m.RequestClaim("r1", worker_id="worker-before", attempt=2, step_index=7)
    driver.handle(m.SubmitRequests(GATEWAY, (request("r1"),), (claim,)))
    assert driver.statuses() == {"r1": "waiting"}
    driver.worker()
    assert driver.core.book.live["r1"].attempt == 3


def test_an_abort_of_a_waiting_request_ends_it() -> None:
    driver = Driver()
    driver.gateway()
    driver.worker(limits=m.WorkerLimits(max_num_seqs=1, max_residents=1))
    driver.submit(*requests("r1", "r2"))
    aborted = ErrorInfo("aborted", "the request was aborted")
    assert driver.abort("r2") == [Send(GATEWAY, m.RequestUpdate("r2", "finished_aborted", error=aborted))]
    assert len(driver.core.book.queue) == 0


@pytest.mark.parametrize("status", ["preparing", "ready", "running", "decoding"])
def test_an_abort_on_a_worker_ends_it_and_is_told_to_the_worker_at_once(status: str) -> None:
    driver = serving()
    driver.submit(request("r0", height=128), request("r1", num_inference_steps=1))
    driver.ready("r0")
    if status != "preparing":
        driver.ready("r1")
    if status in ("running", "decoding"):
        driver.result(5, {"r0": 4}, last=5)
        driver.done("r0")
    if status == "decoding":
        driver.result(driver.newest(), {"r1": 1})
    assert driver.status("r1") == status
    sends = driver.abort("r1")
    assert ("r1", "finished_aborted") in updates(sends)
    plan = plans(sends)[0]
    assert plan.released == (m.ReleasedRequest("r1", 1, "aborted"),)
    assert "r1" not in members(plan)
    assert "r1" not in driver.known_worker().residents


def test_a_release_is_repeated_until_the_worker_has_confirmed_it() -> None:
    driver = running(*requests("r1", "r2"))
    driver.abort("r1")
    told = driver.newest()
    driver.beats(resident("r2"), last=told - 1, idle=False)
    (plan,) = plans(driver.submit(request("r3")))
    assert [x.request_id for x in plan.released] == ["r1"]
    driver.beats(resident("r2"), last=told, idle=False)
    (plan,) = plans(driver.submit(request("r4")))
    assert plan.released == ()


def test_another_gateway_can_not_abort_it() -> None:
    driver = serving()
    driver.gateway(OTHER)
    driver.submit(request("r1"))
    assert driver.abort("r1", gateway_id=OTHER) == []
    assert driver.status("r1") == "preparing"


def test_an_abort_of_the_unknown_is_ignored() -> None:
    assert serving().abort("r9") == []


def test_a_step_is_told_at_most_every_tenth_of_a_second() -> None:
    driver = running(request("r1", num_inference_steps=20))
    told = []
    for step in range(1, 11):
        driver.now += 0.03
        sends = driver.result(driver.known_worker().outstanding[0].step_id, {"r1": step})
        told += [x.step_index for x in to_gateway(sends) if x.status == "running"]
    assert told == [4, 8]


def test_models_are_told_to_every_gateway_when_they_change() -> None:
    driver = Driver()
    driver.gateway()
    driver.gateway(OTHER)
    one = m.ModelsUpdate(BOOT, (m.ModelStatus(profile(), 1),))
    two = m.ModelsUpdate(BOOT, (m.ModelStatus(profile(), 2),))
    none = m.ModelsUpdate(BOOT, (m.ModelStatus(profile(), 0),))
    assert [x for x in driver.worker("worker-a") if x.to != "worker-a"] == [Send(GATEWAY, one), Send(OTHER, one)]
    assert [x for x in driver.worker("worker-b") if x.to != "worker-b"] == [Send(GATEWAY, two), Send(OTHER, two)]
    assert driver.handle(m.WorkerDraining("worker-b", BOOT)) == [Send(GATEWAY, one), Send(OTHER, one)]
    assert driver.handle(m.WorkerDraining("worker-a", BOOT, leaving=True)) == [Send(GATEWAY, none), Send(OTHER, none)]


def test_a_gateway_is_told_the_models_after_its_hello() -> None:
    driver = serving()
    assert driver.gateway(OTHER) == [Send(OTHER, m.ModelsUpdate(BOOT, (m.ModelStatus(profile(), 1),)))]
