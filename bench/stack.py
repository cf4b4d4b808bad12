"""Stepweave's processes as a measurement needs them: started singly, pinned to cores, ended together.

Role: child processes and nothing else. It speaks to them as an operator would (flags, signals, the health page). Each
holds one end of a lifeline pipe, so none outlives this process, however that ends.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp

from common.config import new_peer_id
from common.process import LIFELINE_FD_VARIABLE

ROOT = Path(__file__).parent.parent
READY_S = 300.0  # to load a large model and draw its warm-up picture
STOP_S = 10.0  # from SIGTERM to SIGKILL
POLL_S = 0.1
WORKER = ["services.cli", "worker"]  # the arguments of `python -m` that start one
ONE_THREAD = ["--threads", "1"]


class BenchError(Exception):
    """A measurement can't be made; the message says why."""


class Processes:
    """The children of one measurement, ended in the reverse order of their starts. Use it as a context."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="stepweave-bench-"))
        self._children: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._killed: list[subprocess.Popen[bytes]] = []  # on purpose
        self._lifeline_child_end, self._lifeline_own_end = os.pipe()

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        children = [child for _, child in reversed(self._children)]
        for child in children:
            if child.poll() is None:
                child.terminate()
        end = time.monotonic() + STOP_S
        for child in children:
            try:
                child.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            with contextlib.suppress(ProcessLookupError):  # what it started and did not end, if anything
                os.killpg(child.pid, signal.SIGKILL)
        os.close(self._lifeline_own_end)
        os.close(self._lifeline_child_end)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(
        self, name: str, command: Sequence[str], cores: Sequence[int] | None = None, pipes: bool = False
    ) -> subprocess.Popen[bytes]:
        """Starts `python -m command…` on these cores; what it writes to stderr is shown if it fails. With `pipes`, its
        standard input and output are pipes."""
        # As `stepweave serve` does: no setting from outside speaks to it.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("STEPWEAVE_")}
        with (self.folder / f"{name}.log").open("wb") as log, on_cores(cores):
            child = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else log,
                stderr=log,
                cwd=ROOT,
                env=environment | {LIFELINE_FD_VARIABLE: str(self._lifeline_child_end)},
                pass_fds=(self._lifeline_child_end,),
                start_new_session=True,  # Ctrl-C reaches this process alone, which then ends them
            )
        self._children.append((name, child))
        return child

    def kill(self, child: subprocess.Popen[bytes]) -> None:
        """SIGKILL: it has no time for a word."""
        self._killed.append(child)
        child.kill()
        child.wait()

    def check(self) -> None:
        """Raises `BenchError` if one of them has ended by itself, with its last words."""
        for name, child in self._children:
            if child.poll() is not None and child not in self._killed:
                words = (self.folder / f"{name}.log").read_text(errors="replace").strip()[-2000:]
                raise BenchError(f"the {name} ended with exit code {child.returncode}:\n{words}")

    async def until_ready(self, url: str, path: str = "/health/ready", workers: int = 1) -> None:
        """Waits until the server at `url` would serve, with so many workers. Raises `BenchError` past the deadline."""
        async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=5)) as session:
            end = time.monotonic() + READY_S
            while not await _is_ready(session, path, workers):
                self.check()
                if time.monotonic() > end:
                    raise BenchError(f"the server at {url} was not ready within {READY_S:g} s")
                await asyncio.sleep(POLL_S)


async def _is_ready(session: aiohttp.ClientSession, path: str, workers: int) -> bool:
    try:
        async with session.get(path) as response:
            if response.status != 200:
                return False
        if workers == 1:
            return True
        async with session.get("/v1/models") as response:
            models = (await response.json())["data"]
            return bool(sum(model["workers"] for model in models) >= workers)
    except (aiohttp.ClientError, TimeoutError):  # it is not listening yet
        return False


@contextlib.contextmanager
def on_cores(cores: Sequence[int] | None) -> Iterator[None]:
    """This thread on these cores for a while, and whatever is started meanwhile for all its life."""
    before = os.sched_getaffinity(0)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Stack:
    """A scheduler and a gateway, and the workers that a measurement starts."""

    def __init__(
        self,
        processes: Processes,
        cores: Sequence[int] | None = None,
        scheduler_flags: Sequence[str] = (),
        gateway_flags: Sequence[str] = (),
    ) -> None:
        self._processes = processes
        self.scheduler_address = f"ipc://{processes.folder}/{new_peer_id('scheduler')}"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        quiet = ["--log-level", "warning", "--config", os.devnull]
        self.scheduler = processes.start(
            "scheduler",
            ["services.cli", "scheduler", "--bind", self.scheduler_address, *quiet, *scheduler_flags],
            cores,
        )
        data = f"ipc://{processes.folder}/{new_peer_id('data')}"
        gateway = ["gateway", "--scheduler", self.scheduler_address, "--data-bind", data, "--port", str(port)]
        self.gateway = processes.start("gateway", ["services.cli", *gateway, *quiet, *gateway_flags], cores)

    def start_worker(
        self, program: Sequence[str], *flags: str, name: str = "worker", cores: Sequence[int] | None = None
    ) -> subprocess.Popen[bytes]:
        """`program` takes the flags of `stepweave worker`."""
        own = ["--scheduler", self.scheduler_address, "--name", name, "--log-level", "warning", "--config", os.devnull]
        return self._processes.start(name, [*program, *own, *flags], cores)


def split_cores() -> tuple[list[int], list[int]]:
    """One core for the worker, and the others. Raises `BenchError` on a machine with a single core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchError("this measurement needs two cores: one for the worker, one for all else")
    return cores[:1], cores[1:]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
