"""A server of pictures that does what a test says, on a real port."""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

PICTURE = base64.b64encode(b"\x89PNG\r\n\x1a\n and so on").decode()

Answer = Callable[[dict[str, Any]], Awaitable[web.StreamResponse]]


def pictures(body: dict[str, Any], denoise_s: float = 0.0) -> web.Response:
    """What was asked for."""
    picture = {"b64_json": PICTURE, "timings": {"denoise_s": denoise_s}}
    return web.json_response({"data": [picture] * body["n"]})


def refusal(status: int, code: str) -> web.Response:
    return web.json_response({"error": {"message": "no", "type": "x", "param": None, "code": code}}, status=status)


class FakeServer:
    """It keeps the bodies that it was sent, and the most calls that were open at a time."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.called = asyncio.Event()
        self.open = 0
        self.most_open = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.called.set()
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self._answer(body)
        finally:
            self.open -= 1


@contextlib.asynccontextmanager
async def fake_server(answer: Answer) -> AsyncIterator[FakeServer]:
    """Runs one."""
    server = FakeServer(answer)
    app = web.Application()
    app.add_routes([web.post("/v1/images/generations", server.handle)])
    runner: Any = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
