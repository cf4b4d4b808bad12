"""Silence, return, lost messages and disagreement: these events, then exactly these messages."""

import pytest

from common import messages as m
from services.scheduler.core import Send
from services.scheduler.request import InvalidTransition
from tests.builders import gateway_hello, profile, request, worker_hello
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
    to_worker,
    updates,
)

OTHER = "worker-b"
WELCOME = m.Welcome(BOOT)


def beat_all(driver: Driver, seconds: float, *workers: str, gateways: tuple[str, ...] = (GATEWAY,)) -> list[Send]:
    """Time passes while these, and only these, beat."""
    sends: list[Send] = []
    end = driver.now + seconds
    while driver.now < end:
        sends += driver.tick(min(0.5, end - driver.now))
        for gateway_id in gateways:
            sends += driver.gateway_beats(gateway_id)
        for worker_id in workers:
            held = tuple(
                resident(r, _phase(residency.request.status), residency.request.step_index)
                for r, residency in driver.known_worker(worker_id).residents.items()
            )
            sends += driver.beats(*held, worker_id=worker_id, idle=False)
    return sends


def _phase(status: str) -> m.ResidentPhase:
    return "preparing" if status == "preparing" else "decoding" if status == "decoding" else "denoising"


# Peers that are not known


@pytest.mark.parametrize(
    "event",
    [
        m.GatewayHeartbeat("x", BOOT),
        m.SubmitRequests("x", (request("r1"),)),
        m.AbortRequest("x", ("r1",)),
        m.RequestReady("x", "r1", 1, 0, 4),
        m.StepResult("x", BOOT, 1),
        m.RequestDone("x", "r1", 1, "completed"),
        m.WorkerHeartbeat("x", BOOT, 0, True),
        m.WorkerDraining("x", BOOT),
        gateway_hello("x", scheduler_boot_id="an-earlier-epoch"),
        worker_hello("x", scheduler_boot_id="an-earlier-epoch"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_an_unknown_peer_is_welcomed_and_otherwise_ignored(event: m.ToScheduler) -> None:
    driver = Driver()
    assert driver.handle(event) == [Send("x", WELCOME)]
    assert driver.core.fleet.workers == {}
    assert driver.core.gateways == {}


@pytest.mark.parametrize(
    "event",
    [
        m.GatewayHeartbeat(GATEWAY, "an-earlier-epoch"),
        m.StepResult(WORKER, "an-earlier-epoch", 3, progress=(m.Progress("r1", 1, 1),), plan_done=True),
        m.WorkerHeartbeat(WORKER, "an-earlier-epoch", 99, True),
        m.WorkerDraining(WORKER, "an-earlier-epoch", leaving=True),
    ],
    ids=lambda event: type(event).__name__,
)
def test_what_belongs_to_an_earlier_epoch_is_welcomed_and_otherwise_ignored(event: m.ToScheduler) -> None:
    driver = running(request("r1"))
    sends = driver.handle(event)
    assert [x.message for x in sends] == [WELCOME]
    assert driver.core.book.live["r1"].step_index == 0


def test_a_first_hello_without_an_epoch_is_accepted_and_told_the_epoch() -> None:
    driver = Driver()
    assert driver.handle(worker_hello()) == [Send(WORKER, WELCOME), Send(WORKER, m.StepPlan(BOOT, 1))]
    models = m.ModelsUpdate(BOOT, (m.ModelStatus(profile(), 1),))
    assert driver.handle(gateway_hello()) == [Send(GATEWAY, WELCOME), Send(GATEWAY, models)]


def test_another_protocol_version_is_refused() -> None:
    driver = Driver()
    for hello in (worker_hello(protocol_version=99), gateway_hello(protocol_version=99)):
        (send,) = driver.handle(hello)
        assert isinstance(send.message, m.Refused)
        assert send.message.error.code == "protocol_mismatch"
    assert driver.core.fleet.workers == {}
    assert driver.core.gateways == {}


def test_another_profile_under_the_name_of_a_served_model_is_refused() -> None:
    driver = serving()
    (send,) = driver.worker(OTHER, profile=profile(default_height=128))
    assert isinstance(send.message, m.Refused)
    assert OTHER not in driver.core.fleet.workers


def test_another_profile_is_accepted_when_the_old_workers_are_gone() -> None:
    driver = serving()
    driver.handle(m.WorkerDraining(WORKER, BOOT, leaving=True))
    newer = profile(default_height=128)
    sends = driver.worker(OTHER, profile=newer)
    assert to_gateway(sends) == [m.ModelsUpdate(BOOT, (m.ModelStatus(newer, 1),))]


# Silence


def test_a_suspect_worker_gets_nothing_new_until_it_speaks() -> None:
    driver = serving()
    driver.tick(2.0)
    assert driver.submit(request("r1")) == [Send(GATEWAY, m.RequestUpdate("r1", "waiting"))]
    sends = driver.beats(last=1)
    assert [new.request.request_id for plan in plans(sends) for new in plan.new] == ["r1"]


def test_the_requests_of_a_lost_worker_go_elsewhere_in_their_old_order() -> None:
    driver = Driver()
    driver.gateway()
    driver.worker(limits=m.WorkerLimits(max_num_seqs=2, max_residents=2))
    driver.submit(request("r1"), request("r2"), request("r3"))
    driver.ready("r1")
    beat_all(driver, 5.0)
    assert WORKER not in driver.core.fleet.workers
    assert [r.request_id for r in driver.core.book.queue.models()["demo"]] == ["r1", "r2", "r3"]
    (plan,) = plans(driver.worker(OTHER), OTHER)
    # Of the two that the first may have died of, a worker takes one at a time.
    assert [(new.request.request_id, new.attempt) for new in plan.new] == [("r1", 2), ("r3", 1)]
    (plan,) = plans(driver.done("r1", worker_id=OTHER, attempt=2), OTHER)
    assert [(new.request.request_id, new.attempt) for new in plan.new] == [("r3", 1), ("r2", 2)]


def test_a_worker_that_speaks_is_not_lost() -> None:
    driver = running(request("r1"))
    beat_all(driver, 20.0, WORKER)
    assert driver.statuses() == {"r1": "running"}


def test_a_leaving_worker_is_lost_at_once() -> None:
    driver = running(request("r1"))
    driver.worker(OTHER)
    sends = driver.handle(m.WorkerDraining(WORKER, BOOT, leaving=True))
    assert updates(sends) == [("r1", "waiting"), ("r1", "preparing")]
    assert [new.attempt for new in plans(sends, OTHER)[0].new] == [2]


def test_a_draining_worker_finishes_what_it_has_and_gets_nothing_new() -> None:
    driver = running(request("r1", num_inference_steps=1))
    driver.handle(m.WorkerDraining(WORKER, BOOT))
    assert driver.submit(request("r2")) == [Send(GATEWAY, m.RequestUpdate("r2", "waiting"))]
    driver.result(driver.newest(), {"r1": 1})
    driver.done("r1")
    assert driver.status("r1") == "finished_completed"


def test_a_request_is_given_up_after_too_many_dispatches() -> None:
    driver = serving(max_attempts=2)
    driver.submit(request("r1"))
    for _ in range(2):
        sends = driver.beats()  # which say that it is not there
    (update,) = [x for x in to_gateway(sends) if isinstance(x, m.RequestUpdate)]
    assert (update.status, update.error and update.error.code, update.attempt) == ("finished_error", "worker_lost", 2)


def test_a_silent_gateway_loses_its_requests() -> None:
    driver = running(request("r1"))
    sends = beat_all(driver, 5.0, WORKER, gateways=())
    assert ("r1", "finished_aborted") in updates(sends)
    assert any(released.request_id == "r1" for plan in plans(sends) for released in plan.released)
    assert driver.core.gateways == {}


def test_the_next_deadline_is_the_first_silence_with_a_consequence() -> None:
    driver = Driver(suspect_after_s=2.0, lost_after_s=5.0)
    assert driver.core.next_deadline() is None
    driver.worker()
    assert driver.core.next_deadline() == 2.0
    driver.tick(2.0)
    assert driver.core.next_deadline() == 5.0


def test_a_tick_looks_only_at_those_that_are_due() -> None:
    driver = serving(suspect_after_s=2.0)
    driver.tick(1.0)
    driver.beats(last=1)
    driver.tick(1.5)
    assert not driver.known_worker().suspect
    driver.tick(0.5)
    assert driver.known_worker().suspect


# Return


def test_a_lost_worker_that_returns_is_told_to_forget_its_old_attempts() -> None:
    driver = running(request("r1"))
    driver.worker(OTHER)
    beat_all(driver, 5.0, OTHER)
    assert driver.core.book.live["r1"].worker_id == OTHER
    assert driver.beats(resident("r1", step=1), last=4) == [Send(WORKER, WELCOME)]
    (plan,) = plans(driver.worker(residents=(resident("r1", step=1),), last_step_id=4))
    assert plan.released == (m.ReleasedRequest("r1", 1, "superseded"),)
    assert plan.step_id > 4
    assert driver.core.book.live["r1"].worker_id == OTHER


def test_a_picture_that_a_lost_worker_still_made_changes_nothing_here() -> None:
    driver = running(request("r1"))
    driver.worker(OTHER)
    beat_all(driver, 5.0, OTHER)
    driver.worker()
    assert driver.done("r1") == []
    assert driver.status("r1") == "preparing"


def test_a_hello_of_a_known_worker_tells_where_its_requests_are() -> None:
    driver = running(request("r1", num_inference_steps=9), request("r2", num_inference_steps=9))
    sends = driver.worker(residents=(resident("r1", step=3, total=9),), last_step_id=driver.newest())
    assert driver.core.book.live["r1"].step_index == 3
    assert updates(sends)[:1] == [("r2", "waiting")]
    assert driver.core.book.live["r2"].attempt == 2
    first = plans(sends)[0]
    assert members(first)["r1"] == 4


def test_a_hello_with_residents_that_nobody_asked_for_releases_them() -> None:
    driver = serving()
    (plan,) = plans(driver.worker(OTHER, residents=(resident("r9", attempt=3),)), OTHER)
    assert plan.released == (m.ReleasedRequest("r9", 3, "superseded"),)


# Lost messages


def test_a_plan_that_was_not_received_in_a_second_is_sent_again() -> None:
    driver = running(request("r1"))
    newest = driver.newest()
    driver.now = 0.9
    assert driver.beats(resident("r1"), last=newest - 1, idle=False) == []
    driver.now = 1.1
    (plan,) = plans(driver.beats(resident("r1"), last=newest - 1, idle=False))
    assert plan.step_id > newest
    assert members(plan)["r1"] >= 2


def test_plans_that_an_idle_worker_never_received_are_void() -> None:
    driver = running(request("r1"))
    driver.now = 1.1
    first, second = plans(driver.beats(resident("r1"), last=2, idle=True))
    assert (members(first), members(second)) == ({"r1": 1}, {"r1": 2})


def test_plans_that_an_idle_worker_has_received_are_over() -> None:
    driver = running(request("r1"))
    sends = driver.beats(resident("r1", step=2), idle=True)
    assert members(plans(sends)[0]) == {"r1": 3}
    assert driver.core.book.live["r1"].step_index == 2


def test_a_lost_new_request_is_told_again() -> None:
    driver = serving()
    driver.submit(request("r1"))
    driver.now = 1.1
    (plan,) = plans(driver.beats(last=1))
    assert [new.request.request_id for new in plan.new] == ["r1"]
    assert driver.core.book.live["r1"].attempt == 1


def test_a_received_request_that_is_not_on_its_worker_is_dispatched_again() -> None:
    driver = serving()
    driver.submit(request("r1"))
    sends = driver.beats()
    assert updates(sends) == [("r1", "waiting"), ("r1", "preparing")]
    assert driver.core.book.live["r1"].attempt == 2


def test_a_lost_ready_is_made_up_by_a_heartbeat() -> None:
    driver = serving()
    driver.submit(request("r1"))
    assert ("r1", "running") in updates(driver.beats(resident("r1")))


def test_a_lost_result_is_made_up_by_a_heartbeat() -> None:
    driver = running(request("r1", num_inference_steps=1))
    assert updates(driver.beats(resident("r1", "decoding", step=1, total=1))) == [("r1", "decoding")]


def test_a_resident_that_decodes_has_all_its_steps_behind_it_whatever_it_says_of_them() -> None:
    driver = running(request("r1"))
    assert updates(driver.beats(resident("r1", "decoding"))) == [("r1", "decoding")]
    assert driver.core.book.live["r1"].step_index == 4


def test_a_lost_done_means_that_the_request_is_made_again() -> None:
    driver = running(request("r1", num_inference_steps=1))
    driver.beats(resident("r1", "decoding", step=1, total=1))
    assert updates(driver.beats()) == [("r1", "waiting"), ("r1", "preparing")]


def test_a_resident_with_an_unknown_attempt_is_released() -> None:
    driver = serving()
    (plan,) = plans(driver.beats(resident("r9", attempt=2)))
    assert plan.released == (m.ReleasedRequest("r9", 2, "superseded"),)


def test_an_agreeing_heartbeat_is_answered_with_nothing() -> None:
    driver = running(request("r1"))
    driver.now = 30.0
    assert driver.beats(resident("r1"), idle=False) == []


def test_a_message_of_an_unknown_worker_is_not_answered_to_others() -> None:
    driver = serving()
    assert to_worker(driver.handle(m.WorkerHeartbeat("x", BOOT, 0, True))) == []


def test_what_was_to_be_sent_before_an_error_comes_with_the_next_event() -> None:
    driver = serving()
    driver.submit(request("r1"), request("r2"))
    driver.core.book.live["r2"].status = "waiting"  # a record that contradicts the rest
    with pytest.raises(InvalidTransition, match="r2, attempt 1"):
        driver.core.handle(m.WorkerDraining(WORKER, BOOT, leaving=True), 0.0)
    sends = driver.core.handle(m.GatewayHeartbeat(GATEWAY, BOOT), 0.0)
    assert ("r1", "waiting") in updates(sends)


def test_a_worker_that_spoke_and_falls_silent_again_is_suspect_as_soon_as_the_first_time() -> None:
    driver = serving(suspect_after_s=2.0, lost_after_s=60.0)
    driver.gateway()
    driver.tick(2.0)
    assert driver.known_worker().suspect
    driver.tick(0.1)
    driver.beats()
    assert not driver.known_worker().suspect
    for _ in range(41):
        driver.gateway_beats()
        driver.tick(0.05)
    assert driver.known_worker().suspect


def test_a_worker_that_flaps_leaves_nothing_behind_in_the_watch() -> None:
    driver = serving(suspect_after_s=2.0, lost_after_s=5.0)
    for _ in range(100):
        driver.gateway_beats()
        driver.tick(2.1)
        driver.beats()
    driver.tick(4.0)
    assert len(driver.core._worker_watch._heap) <= 3
