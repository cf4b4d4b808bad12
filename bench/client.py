"""Calls a server as users would, open or closed loop, and notes what became of each call.

Role: asyncio and HTTP. It decides nothing about what is called and computes no statistics. Every call that was begun or
was due ends in exactly one `Result`, also when the run is interrupted.

In an open loop a call is made at its time whatever the server does, and its latency counts from that time: a server
that stalls can't slow its own measurement down. In a closed loop each client makes its next call when the one before
has ended, so a slow server is asked less; the latency counts from sending. A client whose call failed waits a little,
as users do, instead of spending the whole workload on a server that refuses.
"""

import asyncio
import base64
import binascii
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import aiohttp
from msgspec import Struct

from bench.stack import BenchError
from bench.workload import Call

PATH = "/v1/images/generations"
AFTER_FAILURE_S = 0.5  # until a client of the closed loop calls again

Outcome = Literal[
    "completed",
    "refused",  # 429: the server said at once that it is too busy
    "client_error",  # another 4xx: the workload asks for what the server can't do
    "server_error",  # 5xx
    "timeout",
    "disconnected",  # no connection, or it broke
    "wrong_reply",  # a 200 without the pictures that were asked for
    "interrupted",  # under way or due when the run was ended
]

_SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF")


class Result(Struct, frozen=True):
    """What became of one call. Times are seconds from the start of the load."""

    call: Call
    due_s: float  # when it should have been made
    sent_s: float  # when it was made
    done_s: float
    outcome: Outcome
    detail: str = ""  # of what went wrong: the error's code, or what was raised
    pictures: int = 0
    denoise_s: float = 0.0  # summed over its pictures, where the server tells

    @property
    def latency_s(self) -> float:
        return self.done_s - self.due_s


class Load:
    """One run: results as they come, and all of them at the end."""

    def __init__(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self._session = session
        self._timeout_s = timeout_s
        self._begun = time.perf_counter()
        self.results: list[Result] = []  # in the order of their ends
        self.on_result: Callable[[Result], None] | None = None  # told of each as it comes

    def now(self) -> float:
        """Seconds from the start of the load."""
        return time.perf_counter() - self._begun

    async def open_loop(self, calls: Sequence[Call]) -> None:
        """Makes each call at its time. Returns when all have ended. Cancelled, it notes what was under way."""
        self._begun = time.perf_counter()
        tasks: list[asyncio.Task[Result]] = []
        try:
            for call in calls:
                delay = call.at_s - self.now()
                if delay > 0:
                    await asyncio.sleep(delay)
                tasks.append(asyncio.create_task(self.make(call, call.at_s)))
            await asyncio.gather(*tasks)
        finally:
            await _end(tasks)

    async def closed_loop(self, calls: Sequence[Call], clients: int) -> None:
        """Has `clients` clients work the calls off, each one call at a time."""
        self._begun = time.perf_counter()
        left = iter(calls)
        tasks = [asyncio.create_task(self._work_off(left)) for _ in range(clients)]
        try:
            await asyncio.gather(*tasks)
        finally:
            await _end(tasks)

    async def _work_off(self, calls: Iterator[Call]) -> None:
        for call in calls:
            result = await self.make(call)
            if result.outcome != "completed":
                await asyncio.sleep(AFTER_FAILURE_S)

    async def make(self, call: Call, due_s: float | None = None) -> Result:
        """Makes one call, now. `due_s`: when it should have been made."""
        sent_s = self.now()
        outcome: Outcome = "interrupted"
        detail, reply, done_s = "", None, None
        try:
            async with asyncio.timeout(self._timeout_s), self._session.post(PATH, json=call.body()) as response:
                data = await response.read()
                done_s = self.now()  # what follows is this client's own time
                reply = _parsed(data)
                outcome, detail = judge(response.status, reply, call)
        except TimeoutError:
            outcome, detail = "timeout", f"no reply within {self._timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            outcome, detail = "disconnected", type(error).__name__
        finally:
            completed = outcome == "completed"
            result = Result(
                call,
                sent_s if due_s is None else due_s,
                sent_s,
                self.now() if done_s is None else done_s,
                outcome,
                detail,
                pictures=call.n if completed else 0,
                denoise_s=_denoise_s(reply) if completed else 0.0,
            )
            self.results.append(result)
            if self.on_result is not None:
                self.on_result(result)
        return result


def _parsed(data: bytes) -> Any:
    """None where it is no JSON: what a proxy says of a server that is gone."""
    try:
        return json.loads(data)
    except ValueError:
        return None


def judge(status: int, reply: Any, call: Call) -> tuple[Outcome, str]:
    """Whether a reply is what was asked for; if not, why not."""
    if status == 200:
        pictures = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(pictures, list) or len(pictures) != call.n:
            return "wrong_reply", f"not the {call.n} pictures that were asked for"
        if not all(isinstance(picture, dict) and _is_picture(picture.get("b64_json")) for picture in pictures):
            return "wrong_reply", "what should be a picture is none"
        return "completed", ""
    error = reply.get("error") if isinstance(reply, dict) else None
    detail = f"{status} {error.get('code') or error.get('message', '')}" if isinstance(error, dict) else str(status)
    if status == 429:
        return "refused", detail
    return ("client_error" if 400 <= status < 500 else "server_error"), detail


def _is_picture(text: Any) -> bool:
    """Whether it begins like one. To decode it all would take the time of the machine that is being measured."""
    try:
        return isinstance(text, str) and base64.b64decode(text[:16], validate=True).startswith(_SIGNATURES)
    except binascii.Error:
        return False


def _denoise_s(reply: Any) -> float:
    """0 from a server that does not tell it."""
    return float(sum(picture.get("timings", {}).get("denoise_s", 0.0) for picture in reply["data"]))


def check_completed(results: Sequence[Result]) -> None:
    """Raises `BenchError` if a call failed: then a budget's figure would say nothing."""
    failed = next((result for result in results if result.outcome != "completed"), None)
    if failed is not None:
        raise BenchError(f"call {failed.call.number} ended as {failed.outcome}: {failed.detail}")


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def connected(url: str, timeout_s: float = 600.0) -> AsyncIterator[Load]:
    """A load on the server at `url`, which has made no call yet."""
    # As many connections as there are calls: one that waits for a connection would be late without the server's doing.
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        yield Load(session, timeout_s)
