"""The bench's client against a real server that behaves well or badly."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from bench.client import Result, connected
from bench.stack import free_port
from bench.workload import Call, draw_calls
from tests.bench.builders import MIXES, call
from tests.bench.fake_server import FakeServer, fake_server, pictures, refusal

DEADLINE_S = 20.0


async def one(answer: Any, timeout_s: float = DEADLINE_S, asked: Call | None = None) -> Result:
    async with fake_server(answer) as server, connected(server.url, timeout_s) as load:
        return await load.make(asked or call())


async def test_a_call_that_brings_its_pictures_is_completed() -> None:
    async def answer(body: dict[str, Any]) -> web.Response:
        return pictures(body, denoise_s=0.25)

    result = await one(answer, asked=call(n=4))
    assert (result.outcome, result.pictures, result.denoise_s) == ("completed", 4, 1.0)
    assert 0 < result.latency_s < DEADLINE_S


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(429, "refused"), (400, "client_error"), (404, "client_error"), (500, "server_error"), (503, "server_error")],
)
async def test_an_error_is_counted_by_what_it_is(status: int, outcome: str) -> None:
    async def answer(_: dict[str, Any]) -> web.Response:
        return refusal(status, "some_code")

    result = await one(answer)
    assert (result.outcome, result.detail, result.pictures) == (outcome, f"{status} some_code", 0)


@pytest.mark.parametrize(
    "body",
    ['{"data": []}', '{"data": [{"b64_json": "bm8gcGljdHVyZSBhdCBhbGw="}]}', '{"data": [{}]}', "[]", "picture", "{"],
)
async def test_a_200_without_the_pictures_is_no_success(body: str) -> None:
    async def answer(_: dict[str, Any]) -> web.Response:
        return web.Response(text=body)

    assert (await one(answer)).outcome == "wrong_reply"


async def test_an_error_without_json_is_an_error_all_the_same() -> None:
    async def answer(_: dict[str, Any]) -> web.Response:
        return web.Response(status=502, text="<html>bad gateway</html>")

    result = await one(answer)
    assert (result.outcome, result.detail) == ("server_error", "502")


async def test_a_server_that_says_nothing_is_given_up_at_the_deadline() -> None:
    async def answer(_: dict[str, Any]) -> web.Response:
        return await asyncio.Future()

    result = await one(answer, timeout_s=0.2)
    assert result.outcome == "timeout"
    assert result.latency_s >= 0.2


async def test_a_broken_connection_and_none_at_all_are_noted() -> None:
    async def answer(_: dict[str, Any]) -> web.StreamResponse:
        raise asyncio.CancelledError  # aiohttp closes the connection without a reply

    assert (await one(answer)).outcome == "disconnected"
    async with connected(f"http://127.0.0.1:{free_port()}") as load:
        assert (await load.make(call())).outcome == "disconnected"


async def test_an_open_loop_is_not_slowed_by_a_server_that_stalls() -> None:
    released = asyncio.Event()

    async def answer(body: dict[str, Any]) -> web.Response:
        await released.wait()
        return pictures(body)

    calls = draw_calls(0, [0.02 * number for number in range(30)], MIXES)
    async with fake_server(answer) as server, connected(server.url) as load, asyncio.timeout(DEADLINE_S):
        driving = asyncio.create_task(load.open_loop(calls))
        await until_called(server, len(calls))  # all are made although none was answered
        assert load.results == []
        released.set()
        await driving
    assert server.most_open == len(calls)
    stall_s = min(result.done_s for result in load.results)
    for result in load.results:
        assert result.outcome == "completed"
        assert result.due_s == result.call.at_s
        # From when it was due, not from when the server felt like it.
        assert result.latency_s >= stall_s - result.call.at_s - 1e-6


async def test_a_closed_loop_keeps_as_many_calls_open_as_it_has_clients() -> None:
    all_five = asyncio.Barrier(5)

    async def answer(body: dict[str, Any]) -> web.Response:
        await all_five.wait()
        return pictures(body)

    async with fake_server(answer) as server, connected(server.url, DEADLINE_S) as load:
        await load.closed_loop(draw_calls(0, [0.0] * 40, MIXES), clients=5)
    assert server.most_open == 5
    assert {result.outcome for result in load.results} == {"completed"}
    assert sorted(result.call.number for result in load.results) == list(range(40))
    assert sorted(body["seed"] for body in server.bodies) == [16 * number for number in range(40)]


async def test_a_closed_loop_does_not_spend_its_calls_on_a_server_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    async def answer(_: dict[str, Any]) -> web.Response:
        return refusal(429, "queue_full")

    monkeypatch.setattr("bench.client.asyncio", Clock(note))
    async with fake_server(answer) as server, connected(server.url) as load:
        await load.closed_loop([call(number) for number in range(3)], clients=1)
    assert [result.outcome for result in load.results] == ["refused"] * 3
    assert waits == [0.5] * 3


class Clock:
    """asyncio with another `sleep`."""

    def __init__(self, sleep: Any) -> None:
        self.sleep = sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)


@pytest.mark.parametrize("loop", ["open", "closed"])
async def test_every_call_that_was_due_has_a_result_when_a_run_is_ended(loop: str) -> None:
    async def answer(_: dict[str, Any]) -> web.Response:
        return await asyncio.Future()

    calls = draw_calls(0, [0.0] * 6 + [3600.0], MIXES)
    async with fake_server(answer) as server, connected(server.url) as load, asyncio.timeout(DEADLINE_S):
        driving = asyncio.create_task(load.open_loop(calls) if loop == "open" else load.closed_loop(calls, 6))
        await until_called(server, 6)
        driving.cancel()
        await asyncio.gather(driving, return_exceptions=True)
    assert sorted(result.call.number for result in load.results) == list(range(6))
    assert {result.outcome for result in load.results} == {"interrupted"}


async def until_called(server: FakeServer, times: int) -> None:
    while len(server.bodies) < times:
        server.called.clear()
        await server.called.wait()
