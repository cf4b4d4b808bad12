"""Threads for work that must not run on the event loop.

Role: a fixed number of daemon threads that run jobs in order and hand the outcome back to the loop. Daemons, because a
process that is told to stop must not wait for a model to load. It knows nothing of what the jobs do.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

Context = Callable[[], contextlib.AbstractContextManager[Any]]


class JobThreads:
    """Runs jobs on `threads` threads, each of which enters `context` for its whole life."""

    def __init__(self, name: str, threads: int = 1, context: Context = contextlib.nullcontext) -> None:
        self._context = context
        # Bounded by its users: a request has at most one job at a time, and a worker holds max_residents of them.
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._main, name=f"stepweave-{name}-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """The outcome of `function(*arguments)`. A job whose caller is cancelled before it starts is not run."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            if future.cancelled():
                return
            try:
                result = function(*arguments)
            except BaseException as error:  # goes to the caller
                _hand_over(loop, _fail, future, error)
            else:
                _hand_over(loop, _succeed, future, result)

        self._jobs.put(job)
        return await future

    def put(self, job: Callable[[], None]) -> None:
        """Has a job run that hands its outcome over by itself. It must not raise."""
        self._jobs.put(job)

    def close(self, timeout_s: float = 0.0) -> None:
        """Ends the threads after the jobs that they are at; waits that long for each."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _main(self) -> None:
        with self._context():
            while (job := self._jobs.get()) is not None:
                job()
                del job  # else the last job's tensors live until the next one


def _hand_over(loop: asyncio.AbstractEventLoop, put: Callable[..., None], *arguments: Any) -> None:
    # A closed loop means that the service ended meanwhile: nobody waits any more.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(put, *arguments)


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
