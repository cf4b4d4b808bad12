"""How calls fail: errors of workers and scheduler over HTTP, one outcome each, and nothing left running."""

import asyncio
from typing import get_args

import pytest

from common import messages as m
from common.errors import ErrorCode, ErrorInfo
from services.gateway.errors import HTTP_ERRORS, ApiError
from tests.builders import WORKER
from tests.gateway.conftest import WorkerFactory
from tests.gateway.stack import RunningGateway, ScriptedScheduler, running_gateway, until

EXPECTED = {
    "invalid_request": (400, "invalid_request_error", "false"),
    "model_not_found": (404, "invalid_request_error", "false"),
    "content_policy_violation": (400, "invalid_request_error", "false"),
    "queue_full": (429, "rate_limit_error", "true"),
    "no_worker": (503, "server_error", "true"),
    "generation_failed": (500, "server_error", "false"),
    "non_finite": (500, "server_error", "false"),
    "out_of_memory": (500, "server_error", "false"),
    "worker_lost": (500, "server_error", "false"),
    "worker_died_twice": (500, "server_error", "false"),
    "undelivered": (503, "server_error", "true"),
    "deadline_exceeded": (504, "server_error", "false"),
    "aborted": (503, "server_error", "true"),
    "protocol_mismatch": (500, "server_error", "false"),
    "internal": (500, "server_error", "false"),
}


def test_every_error_code_has_a_place_in_http() -> None:
    assert set(HTTP_ERRORS) == set(get_args(ErrorCode)) == set(EXPECTED)


@pytest.mark.parametrize("code", get_args(ErrorCode))
async def test_error_update_becomes_its_http_error(
    gateway: RunningGateway, scheduler: ScriptedScheduler, code: ErrorCode
) -> None:
    call = gateway.post({"prompt": "red apple"})
    (request,) = await scheduler.accept()
    scheduler.update(request.request_id, "finished_error", error=ErrorInfo(code, "it went wrong", "lora"))
    status, reply, headers = await call
    assert (status, reply["error"]["type"], headers["x-should-retry"]) == EXPECTED[code]
    assert reply["error"] == {"message": "it went wrong", "type": EXPECTED[code][1], "param": "lora", "code": code}
    assert ("Retry-After" in headers) == (headers["x-should-retry"] == "true")


async def test_full_queue_says_when_to_try_again(gateway: RunningGateway, scheduler: ScriptedScheduler) -> None:
    call = gateway.post({"prompt": "red apple"})
    (request,) = (await scheduler.expect(m.SubmitRequests)).requests
    full = ErrorInfo("queue_full", "1,000 requests wait already")
    scheduler.update(request.request_id, "finished_error", error=full, retry_after_s=12.3)
    status, _, headers = await call
    assert status == 429
    assert headers["Retry-After"] == "13"
    assert headers["retry-after-ms"] == "12300"
    assert headers["x-should-retry"] == "true"


@pytest.mark.parametrize(
    ("seconds", "header"),
    [(None, "2"), (0.0, "1"), (0.2, "1"), (-5.0, "2"), (float("nan"), "2"), (float("inf"), "3600"), (1e12, "3600")],
)
def test_retry_after_is_always_a_sensible_number(seconds: float | None, header: str) -> None:
    error = ApiError("full", status=429, retry=True, retry_after_s=seconds)
    assert error.headers["Retry-After"] == header
    assert int(error.headers["retry-after-ms"]) >= 1


async def test_error_update_without_an_error_is_internal(gateway: RunningGateway, scheduler: ScriptedScheduler) -> None:
    call = gateway.post({"prompt": "red apple"})
    (request,) = await scheduler.accept()
    scheduler.update(request.request_id, "finished_error")
    status, reply, _ = await call
    assert (status, reply["error"]["code"]) == (500, "internal")


async def test_abort_by_the_server_is_a_503(gateway: RunningGateway, scheduler: ScriptedScheduler) -> None:
    call = gateway.post({"prompt": "red apple"})
    (request,) = await scheduler.accept()
    scheduler.update(request.request_id, "finished_aborted")
    status, reply, _ = await call
    assert (status, reply["error"]["code"]) == (503, "aborted")


async def test_one_failed_picture_fails_the_call_and_aborts_the_unfinished_ones(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = gateway.post({"prompt": "red apple", "n": 4})
    requests = await scheduler.accept()
    worker = connect_worker(requests[0])
    worker.deliver(requests[0])
    await worker.ack(requests[0])
    scheduler.update(requests[1].request_id, "finished_error", error=ErrorInfo("non_finite", "NaN"))
    status, reply, _ = await call
    assert (status, reply["error"]["code"]) == (500, "non_finite")
    abort = await scheduler.expect(m.AbortRequest)
    assert abort.request_ids == (requests[2].request_id, requests[3].request_id)


async def test_a_refused_call_aborts_nothing(gateway: RunningGateway, scheduler: ScriptedScheduler) -> None:
    call = gateway.post({"prompt": "red apple", "n": 2})
    submit = await scheduler.expect(m.SubmitRequests)
    for request in submit.requests:
        scheduler.update(request.request_id, "finished_error", error=ErrorInfo("queue_full", "full"))
    assert (await call)[0] == 429
    later = gateway.post({"prompt": "red apple"})
    await scheduler.expect(m.SubmitRequests)
    later.cancel()
    # The abort of the later call comes after anything that the first could have sent.
    abort = await scheduler.expect(m.AbortRequest)
    refused = {request.request_id for request in submit.requests}
    assert not refused <= set(abort.request_ids)


async def test_a_second_error_changes_nothing(gateway: RunningGateway, scheduler: ScriptedScheduler) -> None:
    call = gateway.post({"prompt": "red apple"})
    (request,) = await scheduler.accept()
    scheduler.update(request.request_id, "finished_error", error=ErrorInfo("non_finite", "first"))
    scheduler.update(request.request_id, "finished_error", error=ErrorInfo("internal", "second"))
    _, reply, _ = await call
    assert reply["error"]["message"] == "first"


async def test_a_picture_after_an_error_is_acknowledged_as_unknown(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = gateway.post({"prompt": "red apple"})
    (request,) = await scheduler.accept()
    scheduler.update(request.request_id, "finished_error", error=ErrorInfo("worker_lost", "gone"))
    assert (await call)[0] == 500
    worker = connect_worker(request)
    worker.deliver(request)
    assert not (await worker.ack(request)).known


async def test_an_error_after_the_picture_changes_nothing(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = gateway.post({"prompt": "red apple", "n": 2})
    first, second = await scheduler.accept()
    worker = connect_worker(first)
    worker.deliver(first)
    await worker.ack(first)
    scheduler.update(first.request_id, "finished_error", error=ErrorInfo("undelivered", "late"))
    worker.deliver(second)
    assert (await call)[0] == 200


async def test_timeout_is_a_504_and_an_abort(scheduler: ScriptedScheduler) -> None:
    async with running_gateway(scheduler.address, request_timeout_s=0.3) as gateway:
        await gateway.ready()
        call = gateway.post({"prompt": "red apple", "n": 2})
        requests = await scheduler.accept()
        status, reply, headers = await call
        assert (status, reply["error"]["code"]) == (504, "deadline_exceeded")
        assert headers["x-should-retry"] == "false"
        abort = await scheduler.expect(m.AbortRequest)
        assert abort.request_ids == tuple(request.request_id for request in requests)


async def test_a_client_that_goes_away_is_an_abort(gateway: RunningGateway, scheduler: ScriptedScheduler) -> None:
    call = gateway.post({"prompt": "red apple", "n": 2})
    requests = await scheduler.accept()
    call.cancel()  # closes the connection
    abort = await scheduler.expect(m.AbortRequest)
    assert abort.request_ids == tuple(request.request_id for request in requests)
    assert abort.reason == "the client went away"


async def test_a_client_that_goes_away_aborts_only_what_is_unfinished(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = gateway.post({"prompt": "red apple", "n": 2})
    first, second = await scheduler.accept()
    worker = connect_worker(first)
    worker.deliver(first)
    await worker.ack(first)
    call.cancel()
    assert (await scheduler.expect(m.AbortRequest)).request_ids == (second.request_id,)


async def test_a_finished_call_aborts_nothing(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = gateway.post({"prompt": "red apple"})
    (request,) = await scheduler.accept()
    connect_worker(request).deliver(request)
    assert (await call)[0] == 200
    later = gateway.post({"prompt": "red apple"})
    (unfinished,) = await scheduler.accept()
    later.cancel()
    assert (await scheduler.expect(m.AbortRequest)).request_ids == (unfinished.request_id,)


async def test_the_picture_of_an_older_attempt_is_taken_and_the_newer_one_aborted(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = gateway.post({"prompt": "red apple"})
    (request,) = await scheduler.accept()
    scheduler.update(request.request_id, "running", attempt=2, worker_id="other", step_index=3, total_steps=20)
    state = None
    while state is None or state["data"][0]["status"] != "running":
        state = (await gateway.call("GET", f"/v1/requests/{request.request_id.rsplit('-', 1)[0]}"))[1]
    worker = connect_worker(request)
    worker.deliver(request, attempt=1)
    assert (await worker.ack(request)).known
    assert (await call)[0] == 200
    assert (await scheduler.expect(m.AbortRequest)).request_ids == (request.request_id,)


async def test_the_picture_of_the_newest_attempt_aborts_nothing(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    call = gateway.post({"prompt": "red apple"})
    (request,) = await scheduler.accept()
    scheduler.update(request.request_id, "running", attempt=2, worker_id=WORKER)
    worker = connect_worker(request)
    worker.deliver(request, attempt=2)
    assert (await call)[0] == 200
    later = gateway.post({"prompt": "red apple"})
    (unfinished,) = await scheduler.accept()
    later.cancel()
    assert (await scheduler.expect(m.AbortRequest)).request_ids == (unfinished.request_id,)


async def test_an_unexpected_exception_is_a_500_without_a_traceback(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr("services.gateway.routes.images.image_call", broken)
    status, reply, headers = await gateway.post({"prompt": "red apple"})
    assert status == 500
    assert reply["error"]["code"] == "internal"
    assert headers["x-request-id"] in reply["error"]["message"]
    assert "secret detail" not in str(reply)
    logged = capsys.readouterr().out
    assert "secret detail" in logged
    assert headers["x-request-id"] in logged


async def test_no_prompt_text_is_logged(
    gateway: RunningGateway,
    scheduler: ScriptedScheduler,
    connect_worker: WorkerFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    call = gateway.post({"prompt": "unmistakable"}, headers={"X-Client-Request-Id": "mine"})
    (request,) = await scheduler.accept()
    connect_worker(request).deliver(request)
    assert (await call)[0] == 200
    logged = ""

    def read() -> bool:
        nonlocal logged
        logged += capsys.readouterr().out
        return "status=200" in logged

    await until(read)
    assert "client_request_id=mine" in logged
    assert "unmistakable" not in logged


async def test_many_calls_at_once_get_each_their_own_picture(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    calls = {seed: gateway.post({"prompt": "red apple", "seed": seed}) for seed in range(40)}
    requests = [(await scheduler.accept())[0] for _ in calls]
    worker = connect_worker(requests[0])
    for request in requests:
        worker.deliver(request)
    replies = await asyncio.gather(*calls.values())
    assert [reply["seed"] for _, reply, _ in replies] == list(calls)
    assert all(status == 200 for status, _, _ in replies)
