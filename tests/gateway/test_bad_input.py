"""What a client can get wrong: each is a clear error in OpenAI's shape, and the gateway lives on."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common import messages as m
from services.gateway.routes import images
from tests.builders import MODEL
from tests.gateway.bad_bodies import BAD_BODIES, Bad
from tests.gateway.conftest import WorkerFactory
from tests.gateway.stack import RunningGateway, ScriptedScheduler, running_gateway

JSON_TYPE = {"Content-Type": "application/json"}


def encoded(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def assert_error(reply: Any, headers: Any, *, param: str | None, fragment: str) -> None:
    assert reply.keys() == {"error"}
    error = reply["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert fragment in error["message"]
    assert len(error["message"]) < 600
    assert "Traceback" not in error["message"]
    assert headers["x-should-retry"] == "false"
    assert headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("bad", BAD_BODIES, ids=lambda bad: bad.name)
async def test_bad_body_is_refused_with_the_field_at_fault(
    gateway: RunningGateway, scheduler: ScriptedScheduler, bad: Bad
) -> None:
    status, reply, headers = await gateway.post(data=encoded(bad.body), headers=JSON_TYPE)
    assert status == bad.status
    assert_error(reply, headers, param=bad.param, fragment=bad.fragment)
    assert reply["error"]["type"] == "invalid_request_error"
    assert scheduler.inbox.count(m.SubmitRequests) == 0


async def test_the_gateway_serves_on_after_all_bad_bodies(
    gateway: RunningGateway, scheduler: ScriptedScheduler, connect_worker: WorkerFactory
) -> None:
    for bad in BAD_BODIES:
        await gateway.post(data=encoded(bad.body), headers=JSON_TYPE)
    call = gateway.post({"prompt": "red apple"})
    (request,) = await scheduler.accept()
    connect_worker(request).deliver(request)
    assert (await call)[0] == 200


async def test_nesting_that_the_parser_just_takes_is_no_internal_error(gateway: RunningGateway) -> None:
    for depth in range(700, 1_000, 3):
        body = b'{"prompt": "a", "size": ' + b"[" * depth + b"]" * depth + b"}"
        status, _, _ = await gateway.post(data=body, headers=JSON_TYPE)
        assert status == 400, depth


@pytest.mark.parametrize("name", ["size", "output_format", "model", "n", "guidance_scale", "stream", "lora"])
async def test_large_values_are_not_repeated_in_the_message(gateway: RunningGateway, name: str) -> None:
    status, reply, headers = await gateway.post({"prompt": "a", name: "x" * 100_000})
    assert status in (400, 404)
    assert_error(reply, headers, param=name, fragment="")


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
async def test_other_content_types_are_refused(gateway: RunningGateway, content_type: str) -> None:
    status, reply, headers = await gateway.post(data=b'{"prompt": "a"}', headers={"Content-Type": content_type})
    assert status == 400
    assert_error(reply, headers, param=None, fragment="must be application/json")


async def test_body_that_is_not_encoded_as_its_header_says(gateway: RunningGateway) -> None:
    status, reply, headers = await gateway.post(
        data=b'{"prompt": "a"}', headers=JSON_TYPE | {"Content-Encoding": "gzip"}
    )
    assert status == 400
    assert_error(reply, headers, param=None, fragment="")


async def test_body_over_the_limit_is_a_413(gateway: RunningGateway) -> None:
    status, reply, headers = await gateway.post({"prompt": "a" * 2_000_000})
    assert status == 413
    assert_error(reply, headers, param=None, fragment="larger than 1,048,576 bytes")
    assert reply["error"]["type"] == "invalid_request_error"


async def test_body_over_the_limit_once_unpacked_is_a_413(gateway: RunningGateway) -> None:
    data = gzip.compress(json.dumps({"prompt": "a" * 50_000_000}).encode())
    status, reply, headers = await gateway.post(data=data, headers=JSON_TYPE | {"Content-Encoding": "gzip"})
    assert status == 413
    assert_error(reply, headers, param=None, fragment="larger than")


async def test_body_limit_is_a_setting(scheduler: ScriptedScheduler) -> None:
    async with running_gateway(scheduler.address, max_body_bytes=100) as gateway:
        status, _, _ = await gateway.post({"prompt": "a" * 100})
        assert status == 413


@pytest.mark.parametrize(
    ("method", "path", "status", "fragment"),
    [
        ("GET", "/v1/images/generations", 405, "does not take GET"),
        ("DELETE", "/v1/models", 405, "does not take DELETE"),
        ("GET", "/", 404, "there is no / here"),
        ("POST", "/v1/images/edits", 404, "there is no /v1/images/edits here"),
        ("GET", "/v1/../etc/passwd", 404, "there is no"),
        ("GET", "/v1/requests/req_none", 404, "no call 'req_none' is known"),
    ],
)
async def test_wrong_paths_and_methods_have_the_error_shape(
    gateway: RunningGateway, method: str, path: str, status: int, fragment: str
) -> None:
    got, reply, headers = await gateway.call(method, path)
    assert got == status
    assert_error(reply, headers, param="id" if "requests" in path else None, fragment=fragment)


async def test_405_names_the_methods_that_go(gateway: RunningGateway) -> None:
    _, _, headers = await gateway.call("GET", "/v1/images/generations")
    assert headers["Allow"] == "POST"


async def test_unknown_model_is_a_404_with_openais_code(gateway: RunningGateway) -> None:
    status, reply, headers = await gateway.call("GET", "/v1/models/nope")
    assert status == 404
    assert_error(reply, headers, param="model", fragment=f"there is: '{MODEL}'")
    assert reply["error"]["code"] == "model_not_found"


async def test_client_request_id_must_be_short(gateway: RunningGateway) -> None:
    status, reply, headers = await gateway.post({"prompt": "a"}, headers={"X-Client-Request-Id": "x" * 513})
    assert status == 400
    assert_error(reply, headers, param="X-Client-Request-Id", fragment="at most 512")


async def test_body_that_does_not_arrive_is_a_408(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "READ_TIMEOUT_S", 0.05)
    never = asyncio.Event()

    async def half() -> AsyncIterator[bytes]:
        yield b'{"prompt": '
        await never.wait()

    status, reply, headers = await gateway.post(data=half(), headers=JSON_TYPE)
    assert status == 408
    assert_error(reply, headers, param=None, fragment="did not arrive")


async def test_replies_that_no_handler_made_have_a_request_id(gateway: RunningGateway) -> None:
    async with gateway.session.get(gateway.url + "/v1/models", headers={"Expect": "a miracle"}) as response:
        assert response.status == 417
        assert response.headers["x-request-id"].startswith("req_")
