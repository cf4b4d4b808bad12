"""Starting and ending a service process.

Role: run a service's coroutine until it ends or the process is told to stop. SIGTERM and SIGINT cancel it once; so does
the end of the lifeline, a pipe that a supervisor holds open for its children so that they do not outlive it.
"""

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any

LIFELINE_FD_VARIABLE = "STEPWEAVE_LIFELINE_FD"


def run_service(service: Coroutine[Any, Any, None]) -> bool:
    """Runs `service` in a new event loop until it returns, raises, or is told to stop (its task is then cancelled).

    Returns whether it was stopped before it was through.
    """
    return asyncio.run(_until_stopped(service))


async def _until_stopped(service: Coroutine[Any, Any, None]) -> bool:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(service)
    stopping = False

    def stop() -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    lifeline = os.environ.get(LIFELINE_FD_VARIABLE)
    if lifeline is not None:
        _watch_lifeline(loop, int(lifeline), stop)
    try:
        await task
    except asyncio.CancelledError:
        if not stopping:
            raise
        return True
    return False


def _watch_lifeline(loop: asyncio.AbstractEventLoop, fd: int, stop: Any) -> None:
    def on_readable() -> None:  # nothing is ever written, so readable means that the other end is gone
        loop.remove_reader(fd)
        stop()

    loop.add_reader(fd, on_readable)
