"""Requests that a worker may have died of: whom they are blamed on, and that nobody else suffers."""

from typing import Any

import msgspec
import pytest

from common import messages as m
from services.scheduler.core import Send
from tests.builders import request, worker_hello
from tests.scheduler.driver import BOOT, Driver, resident, to_gateway, updates
from tests.scheduler.test_restart import OTHER, new_in, restarted, resubmit

LIMITS = m.WorkerLimits(max_num_seqs=8, max_residents=16)


def lose(driver: Driver, worker_id: str) -> list[Send]:
    """The worker falls silent for ever; all others live."""
    sends: list[Send] = []
    while worker_id in driver.core.fleet.workers:
        sends += driver.tick(0.5)
        driver.gateway_beats()
        for other in list(driver.core.fleet.workers):
            if other != worker_id:
                held = driver.known_worker(other).residents
                steps = {r: (x.request.step_index, x.request.attempt) for r, x in held.items()}
                beats = (resident(r, "preparing", attempt=attempt) for r, (_, attempt) in steps.items())
                sends += driver.beats(*beats, worker_id=other, idle=False)
    return sends


def fleet_of(*workers: str, **core: Any) -> Driver:
    driver = Driver(**core)
    driver.gateway()
    for worker_id in workers:
        driver.worker(worker_id)
    return driver


def test_a_request_on_which_two_workers_died_ends_and_is_given_to_no_third() -> None:
    driver = fleet_of("worker-1")
    driver.submit(request("r1", num_inference_steps=9))
    driver.ready("r1", worker_id="worker-1")
    driver.worker("worker-2")
    driver.worker("worker-3")
    assert ("r1", "preparing") in updates(lose(driver, "worker-1"))
    assert driver.core.book.live["r1"].died_on == ("worker-1",)
    second = driver.core.book.live["r1"].worker_id
    sends = lose(driver, second)
    (last,) = [x for x in to_gateway(sends) if isinstance(x, m.RequestUpdate)]
    assert last.error is not None
    assert (last.status, last.error.code, last.died_on) == ("finished_error", "worker_died_twice", ("worker-1", second))
    assert driver.core.book.live == {}
    assert new_in(sends, "worker-3") == []
    assert to_gateway(driver.submit(request("r1"))) == [last]


def test_one_that_was_not_at_work_is_not_blamed() -> None:
    driver = fleet_of("worker-1")
    driver.submit(request("runs", num_inference_steps=9), request("stands", num_inference_steps=9, height=128))
    driver.ready("runs", worker_id="worker-1")
    driver.ready("stands", worker_id="worker-1")
    assert driver.statuses() == {"runs": "running", "stands": "ready"}
    lose(driver, "worker-1")
    blamed = {r.request_id: r.died_on for r in driver.core.book.live.values()}
    assert blamed == {"runs": ("worker-1",), "stands": ()}


def test_one_that_the_pending_plan_would_start_is_blamed_too() -> None:
    driver = fleet_of("worker-1")
    driver.submit(request("runs", num_inference_steps=2), request("next", num_inference_steps=9, height=128))
    driver.ready("runs", worker_id="worker-1")
    driver.ready("next", worker_id="worker-1")
    driver.result(driver.known_worker("worker-1").outstanding[0].step_id, {"runs": 1}, worker_id="worker-1")
    assert driver.status("next") == "ready"
    lose(driver, "worker-1")
    assert driver.core.book.live["next"].died_on == ("worker-1",)


def test_a_worker_that_leaves_takes_nothing_from_its_requests() -> None:
    driver = fleet_of("worker-0", max_attempts=2)
    driver.submit(request("r1"))
    for number in range(5):
        driver.worker(f"worker-{number + 1}")
        driver.handle(m.WorkerDraining(f"worker-{number}", BOOT, leaving=True))
    live = driver.core.book.live["r1"]
    assert (live.worker_id, live.attempt, live.died_on) == ("worker-5", 6, ())


def test_a_suspect_worker_is_not_a_dead_one() -> None:
    driver = fleet_of("worker-1")
    driver.submit(request("r1"))
    for _ in range(3):
        driver.gateway_beats()
        driver.tick(2.5)
        assert driver.known_worker("worker-1").suspect
        driver.beats(resident("r1", "preparing"), worker_id="worker-1")
    assert driver.core.book.live["r1"].died_on == ()


def test_deaths_are_remembered_over_a_restart_of_the_scheduler() -> None:
    driver = restarted(suspect_after_s=1.0, lost_after_s=2.0)
    driver.worker(OTHER)
    (told,) = to_gateway(resubmit(driver, request("r1"), worker_id="", attempt=1, died_on=("worker-1",)))[:1]
    assert told.died_on == ("worker-1",)
    codes = [x.error.code for x in to_gateway(lose(driver, OTHER)) if isinstance(x, m.RequestUpdate) and x.error]
    assert codes == ["worker_died_twice"]


def test_a_worker_taken_for_dead_that_is_given_the_request_again_is_not_counted() -> None:
    driver = fleet_of("worker-1")
    driver.submit(request("r1"))
    lose(driver, "worker-1")
    assert driver.core.book.live["r1"].died_on == ("worker-1",)
    driver.worker("worker-1")  # it has lost the request on the way
    live = driver.core.book.live["r1"]
    assert (live.worker_id, live.attempt, live.died_on) == ("worker-1", 2, ())


def convicted(sends: list[Send]) -> list[str]:
    messages = [x for x in to_gateway(sends) if isinstance(x, m.RequestUpdate) and x.error is not None]
    return [x.request_id for x in messages if x.error is not None and x.error.code == "worker_died_twice"]


def fail(driver: Driver, worker_id: str) -> list[Send]:
    """The worker ends because it broke, and says so."""
    return driver.handle(m.WorkerDraining(worker_id, BOOT, leaving=True, reason="failed", failed=True))


def full_worker() -> tuple[Driver, list[str]]:
    """A worker that runs 8 requests, "poison" among them, and prepares 8 more; and three workers with nothing to do."""
    driver = Driver()
    driver.gateway()
    driver.worker("worker-1", limits=LIMITS)
    names = ["poison", *(f"r{number}" for number in range(15))]
    for name in names:
        driver.submit(request(name, num_inference_steps=20))
    for name in names[:8]:
        driver.ready(name, worker_id="worker-1")
    for number in (2, 3, 4):
        driver.worker(f"worker-{number}", limits=LIMITS)
    return driver, names


def test_of_all_that_ran_with_it_only_the_one_that_kills_is_convicted() -> None:
    driver, names = full_worker()
    fail(driver, "worker-1")
    assert all(driver.core.book.live[name].died_on == ("worker-1",) for name in names)
    assert driver.core.book.live["poison"].worker_id == "worker-2"
    fresh = [f"fresh{number}" for number in range(6)]
    driver.submit(*(request(name, num_inference_steps=20) for name in fresh))
    mates = [name for name in driver.known_worker("worker-2").residents if name != "poison"]
    assert mates, "it has company, though no other that is on trial"
    assert convicted(fail(driver, "worker-2")) == ["poison"]
    # Whoever was beside it may have been the cause as well, and will be tried.
    assert [driver.core.book.live[name].died_on for name in mates] == [("worker-2",)] * len(mates)


def test_one_that_kills_beside_another_that_is_tried_is_convicted_next() -> None:
    driver, names = full_worker()
    fail(driver, "worker-1")
    for name in names[1:]:  # all that run with it are innocent, and most are drawn
        if name != "r0":
            driver.abort(name)
    driver.abort("poison")
    assert driver.core.book.live["r0"].worker_id == "worker-3"
    for worker_id in ("worker-2", "worker-4"):
        driver.handle(m.WorkerDraining(worker_id, BOOT))
    driver.submit(request("fresh", num_inference_steps=20))
    assert driver.core.book.live["fresh"].worker_id == "worker-3"
    driver.worker("worker-5")
    assert convicted(fail(driver, "worker-3")) == ["r0"]
    assert driver.core.book.live["fresh"].worker_id == "worker-5"
    assert convicted(fail(driver, "worker-5")) == ["fresh"]


def test_the_pictures_of_a_call_are_convicted_together() -> None:
    driver = fleet_of("worker-1")
    driver.submit(*(request(f"r{seed}", seed=seed, num_inference_steps=9) for seed in range(4)))
    driver.submit(request("other", num_inference_steps=9))
    driver.worker("worker-2")
    driver.worker("worker-3")
    fail(driver, "worker-1")
    assert driver.status("r3") == "waiting"
    second = driver.core.book.live["r0"].worker_id
    assert sorted(convicted(fail(driver, second))) == ["r0", "r1", "r2", "r3"]
    assert list(driver.core.book.live) == ["other"]
    driver.core.validate()


def test_one_on_trial_goes_to_a_worker_that_has_proved_itself_rather_than_to_the_emptiest() -> None:
    driver = fleet_of("worker-1")
    driver.submit(request("r1", num_inference_steps=9))
    driver.worker("worker-2")
    driver.submit(request("done", num_inference_steps=9), request("long", prompt="long", num_inference_steps=200))
    on_second = list(driver.known_worker("worker-2").residents)
    driver.done(on_second[0], worker_id="worker-2")
    driver.submit(request("more", num_inference_steps=200))
    driver.worker("worker-3")
    fail(driver, "worker-1")
    assert driver.core.book.live["r1"].worker_id == "worker-2"


def test_a_worker_takes_one_request_on_trial_at_a_time_and_others_beside_it() -> None:
    driver, _ = full_worker()
    fail(driver, "worker-1")
    driver.submit(request("fresh"))
    on_trial = {
        worker_id: [name for name in worker.residents if name != "fresh"]
        for worker_id, worker in driver.core.fleet.workers.items()
    }
    assert on_trial == {"worker-2": ["poison"], "worker-3": ["r0"], "worker-4": ["r1"]}
    assert driver.status("fresh") == "preparing"
    assert new_in(driver.done("r0", worker_id="worker-3", attempt=2), "worker-3") == [("r2", 2)]


@pytest.mark.parametrize("prepared", [False, True])
def test_one_that_gets_past_the_point_is_acquitted_and_makes_room_for_the_next(prepared: bool) -> None:
    driver = fleet_of("worker-1")
    driver.submit(request("r1", num_inference_steps=9), request("r2", num_inference_steps=9))
    if prepared:
        driver.ready("r1", worker_id="worker-1")
        driver.result(driver.known_worker("worker-1").outstanding[0].step_id, {"r1": 1}, worker_id="worker-1")
    died_at = driver.core.book.live["r1"].planned_step
    assert (died_at > 0) == prepared
    driver.worker(OTHER)
    fail(driver, "worker-1")
    assert driver.statuses() == {"r1": "preparing", "r2": "waiting"}
    sends = driver.ready("r1", worker_id=OTHER, attempt=2)
    for step in range(1, died_at + 1):
        assert driver.core.book.live["r1"].died_on == ("worker-1",)
        assert driver.status("r2") == "waiting"
        sends = driver.result(driver.newest(OTHER), {"r1": step}, worker_id=OTHER, attempt=2, done=False)
    assert driver.core.book.live["r1"].died_on == ()
    assert ("r2", 2) in new_in(sends, OTHER)


def test_one_that_was_decoded_is_blamed_and_on_trial_to_its_end() -> None:
    driver = fleet_of("worker-1")
    driver.submit(request("r1", num_inference_steps=1))
    driver.ready("r1", worker_id="worker-1")
    driver.result(driver.known_worker("worker-1").outstanding[0].step_id, {"r1": 1}, worker_id="worker-1")
    assert driver.status("r1") == "decoding"
    driver.worker(OTHER)
    fail(driver, "worker-1")
    driver.ready("r1", worker_id=OTHER, attempt=2)
    driver.result(driver.newest(OTHER), {"r1": 1}, worker_id=OTHER, attempt=2)
    assert driver.core.book.live["r1"].died_on == ("worker-1",)
    assert convicted(fail(driver, OTHER)) == ["r1"]


def test_a_request_that_breaks_every_device_gets_two_of_them() -> None:
    driver = fleet_of("worker-1", "worker-2", "worker-3")
    driver.submit(request("r1", num_inference_steps=9))
    sends: list[Send] = []
    for attempt in (1, 2):
        worker_id = driver.core.book.live["r1"].worker_id
        driver.ready("r1", worker_id=worker_id, attempt=attempt)
        sends = fail(driver, worker_id)
    assert convicted(sends) == ["r1"]
    assert len(driver.core.fleet.workers) == 1


def test_workers_that_only_slept_convict_nobody() -> None:
    driver = fleet_of("worker-1", max_attempts=9)
    driver.submit(request("r1", num_inference_steps=9))
    driver.ready("r1", worker_id="worker-1")
    driver.worker("worker-2")
    for asleep, awake in (("worker-1", "worker-2"), ("worker-2", "worker-1"), ("worker-1", "worker-2")):
        lose(driver, asleep)
        assert driver.core.book.live["r1"].died_on == (asleep,)
        assert driver.core.book.live["r1"].worker_id == awake
        driver.worker(asleep)
        assert driver.core.book.live["r1"].died_on == ()


def test_a_claim_of_a_death_on_a_worker_that_lives_is_not_believed() -> None:
    driver = restarted()
    driver.worker(OTHER)
    resubmit(driver, request("r1"), worker_id="", attempt=1, died_on=(OTHER, "worker-1"))
    assert driver.core.book.live["r1"].died_on == ("worker-1",)


def test_a_worker_that_comes_back_with_another_model_has_not_died() -> None:
    driver = fleet_of("worker-1", OTHER)
    driver.submit(request("r1"))
    profile = worker_hello("worker-1").profile
    driver.worker("worker-1", profile=msgspec.structs.replace(profile, model="another"))
    assert driver.core.book.live["r1"].died_on == ()


def test_leaves_do_not_count_among_the_dispatches_that_a_request_may_have() -> None:
    driver = fleet_of("worker-0", max_attempts=2)
    driver.submit(request("r1"))
    for number in range(5):
        driver.worker(f"worker-{number + 1}")
        driver.handle(m.WorkerDraining(f"worker-{number}", BOOT, leaving=True))
    driver.worker("worker-6")
    driver.handle(m.WorkerDraining("worker-5", BOOT))  # so that it is not given the request again
    driver.beats(worker_id="worker-5")  # and has not got it: the first that counts
    assert driver.status("r1") == "preparing"
