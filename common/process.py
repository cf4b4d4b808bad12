"""Starting and ending a service process.

Role: run a service's coroutine until it ends or the process is told to stop. SIGTERM and SIGINT cancel it once; so does
the end of the lifeline, a pipe that a supervisor holds open for its children so that they do not outlive it.
"""

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LIFELINE_FD_VARIABLE = "STEPWEAVE_LIFELINE_FD"


def run_service(service: Coroutine[Any, Any, None]) -> bool:
    """Runs `service` in a new event loop until it returns, raises, or is told to stop (its task is then cancelled).

    It is the last thing that a process does: afterwards signals to stop are ignored. Returns whether it was stopped
    before it was through.
    """
    try:
        return asyncio.run(_until_stopped(service))
    finally:
        # The outcome is settled. With the loop its handlers are gone, and a signal while the interpreter ends, which
        # takes a while, would make another one of it.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


async def _until_stopped(service: Coroutine[Any, Any, None]) -> bool:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(service)
    stopping = False

    def stop() -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            task.cancel()

    for number in SIGNALS:
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
