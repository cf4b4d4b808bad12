"""Children that die again and again, without the stack around them."""

import asyncio
import errno
import sys

import pytest

from services import supervisor

DEADLINE_S = 30.0


async def start_child(code: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-c", code)


async def test_a_child_that_the_system_has_no_room_for_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [errno.EAGAIN, errno.ENOMEM]
    started: list[str] = []

    async def start_service(name: str, arguments: list[str], lifeline: int) -> asyncio.subprocess.Process:
        if failures:
            raise OSError(failures.pop(), "as the test wanted")
        started.append(name)
        again.set()
        return await start_child("input()")

    again = asyncio.Event()
    monkeypatch.setattr(supervisor, "RESTART_FIRST_S", 0.0)
    monkeypatch.setattr(supervisor, "start_service", start_service)
    ready = asyncio.Event()
    ready.set()
    child = supervisor.Child("worker", [], await start_child("pass"))
    first = child.process
    keeping = asyncio.create_task(supervisor._keep_alive(child, -1, ready))
    try:
        async with asyncio.timeout(DEADLINE_S):
            await again.wait()
            while child.process is first:
                await asyncio.sleep(0)
        assert (started, failures) == (["worker"], [])
    finally:
        keeping.cancel()
        child.process.kill()
        await child.process.wait()
