"""What is always true of the scheduler's state.

Role: assertions over everything, for tests. It changes nothing.
"""

from collections.abc import Mapping

from services.scheduler.book import RequestBook
from services.scheduler.request import LIVE, Request
from services.scheduler.workers import Fleet, Worker


def check(book: RequestBook, fleet: Fleet, holders: Mapping[str, Mapping[str, Worker]], homogeneous: bool) -> None:
    """Raises AssertionError, with the story of the request in question, if something is not as it must be."""
    waiting = {r.request_id: r for queue in book.queue.models().values() for r in queue}
    assert len(waiting) == len(book.queue), f"{len(waiting)} requests wait, counted {len(book.queue)}"
    for queue in book.queue.models().values():
        numbers = [r.number for r in queue]
        assert numbers == sorted(numbers), f"queue out of order: {numbers}"
    held = {r.request_id: r for requests in book.held.values() for r in requests.values()}
    for worker_id, requests in book.held.items():
        assert requests, f"nothing is held for {worker_id}, but listed"
        assert worker_id not in fleet.workers, f"requests are held for {worker_id}, which is here"
    for request_id, request in held.items():
        assert request.claim is not None, f"held without a claim\n{request.tell()}"
        assert request_id in book.held[request.claim.worker_id], f"held for another\n{request.tell()}"
    seen = 0
    for worker in fleet.workers.values():
        _check_worker(worker, homogeneous)
        for request_id, residency in worker.residents.items():
            request = residency.request
            assert book.live.get(request_id) is request, f"resident, but not live\n{request.tell()}"
            assert request.worker_id == worker.worker_id, f"on {worker.worker_id} too\n{request.tell()}"
            seen += 1
    for request_id, request in book.live.items():
        assert request.status in LIVE, f"finished, but live\n{request.tell()}"
        assert request_id not in book.finished, f"live, but remembered as finished\n{request.tell()}"
        assert (request_id in held) == (request.claim is not None), f"claim and hold differ\n{request.tell()}"
        nowhere = request_id in waiting or request_id in held
        assert (request.status == "waiting") == nowhere, f"status and queue differ\n{request.tell()}"
        assert (request.status == "waiting") == (not request.worker_id), f"status and worker differ\n{request.tell()}"
        assert request.worker_id not in request.died_on, f"on one that it killed\n{request.tell()}"
        _check_steps(request)
    assert seen + len(waiting) + len(held) == len(book.live), "some live request is nowhere or in two places"
    unclaimed = {(r, worker.worker_id) for worker in fleet.workers.values() for r in worker.unclaimed}
    listed = {(request_id, worker_id) for request_id, workers in holders.items() for worker_id in workers}
    assert unclaimed == listed, f"unclaimed {unclaimed}, listed {listed}"
    assert not holders.keys() & book.live.keys(), "a live request's attempt is left unclaimed on some worker"
    for model in fleet.models.values():
        for worker in model.workers.values():
            assert fleet.workers.get(worker.worker_id) is worker, f"{worker.worker_id} is gone, but serves"
            assert (worker.worker_id in model.open) == worker.has_room(), f"{worker.worker_id}: wrong room"
        for request in book.queue.waiting(model.profile.model):
            room = [worker for worker in model.open.values() if not (request.on_trial and worker.trials)]
            assert not room, f"waits beside room on {room[0].worker_id}\n{request.tell()}"


def _check_steps(request: Request) -> None:
    assert request.planned_step >= request.step_index, f"planned behind confirmed\n{request.tell()}"
    assert request.planned_step <= request.total_steps, f"planned past the end\n{request.tell()}"
    at_end = request.total_steps > 0 and request.step_index == request.total_steps
    assert at_end == (request.status == "decoding"), f"status and steps differ\n{request.tell()}"


def _check_worker(worker: Worker, homogeneous: bool) -> None:
    name, limits = worker.worker_id, worker.limits
    if limits.max_residents:
        assert len(worker.residents) <= limits.max_residents, f"{name} holds {len(worker.residents)}"
    running = [r.request for r in worker.residents.values() if r.request.status == "running"]
    if limits.max_num_seqs:
        assert len(running) <= limits.max_num_seqs, f"{name} runs {len(running)}"
    ids = [plan.step_id for plan in worker.outstanding]
    assert ids == sorted(set(ids)), f"{name}: plans out of order: {ids}"
    for plan in worker.outstanding:
        members = [request_id for group in plan.groups for request_id in group]
        assert len(members) == len(set(members)), f"{name}: doubled in plan {plan.step_id}"
        assert plan.until.keys() <= worker.residents.keys(), f"{name}: strangers in plan {plan.step_id}"
        assert not limits.max_num_seqs or len(members) <= limits.max_num_seqs, f"{name}: plan {plan.step_id} too large"
        if homogeneous:
            for group in plan.groups:
                keys = {worker.residents[r].shape.key for r in group if r in plan.until}
                assert len(keys) <= 1, f"{name}: plan {plan.step_id} mixes {keys}"
    for request_id, residency in worker.unconfirmed_new.items():
        assert worker.residents.get(request_id) is residency, f"{name} is told of {request_id}, which it does not hold"
    trials = sum(residency.on_trial for residency in worker.residents.values())
    assert trials == worker.trials, f"{name}: {worker.trials} trials, counted {trials}"
    work_s = sum(residency.work_s for residency in worker.residents.values())
    assert abs(work_s - worker.work_s) < 1e-6, f"{name}: work {worker.work_s}, sum {work_s}"
    ready = [r.request for r in worker.residents.values() if r.request.status in ("ready", "preempted", "running")]
    # Every policy runs someone if somebody can run, unless its head still prepares (in request mode, anyone).
    if ready and not worker.outstanding:
        waiting = [r.request for r in worker.residents.values() if r.request.status != "decoding"]
        awaited = waiting[:1] if worker.hello.step_execution else waiting
        assert any(r.status == "preparing" for r in awaited), f"{name} stands still\n{ready[0].tell()}"
