"""Stepweave as a user starts it: child processes, found again by their sockets, ended by their ids."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
from msgspec import Struct

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 90.0  # for what takes a few seconds on a quiet machine


class Stack(Struct):
    """A running stack: the process that was started and where it answers."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path  # what its processes wrote to stderr
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, **options)

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON body; status 0 while nothing answers."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except OSError:
            return 0, None

    def is_ready(self) -> bool:
        """It says so itself, which is when it begins to keep its children alive."""
        return "Stepweave is ready" in self.log.read_text() and self.get("/health/ready")[0] == 200

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def log_lines(self) -> list[dict[str, Any]]:
        """The JSON log lines of all its processes."""
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Returns once the condition holds, fails with `what` past the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s} s: {what}")
        time.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def stepweave(*arguments: str) -> list[str]:
    """The command line of the `stepweave` command in this environment."""
    return [sys.executable, "-m", "services.cli", *arguments]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The `stepweave` command run to its end."""
    return subprocess.run(stepweave(*arguments), check=False, capture_output=True, text=True, timeout=DEADLINE_S)


@contextlib.contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child process that is ended, if need be by force, when the test is through with it."""
    with log.open("ab") as stderr:
        process = subprocess.Popen(command, stdout=stderr, stderr=stderr, cwd=ROOT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def serving(folder: Path, *arguments: str, host: str = "127.0.0.1") -> Iterator[Stack]:
    """`stepweave serve` with these flags, ready."""
    port = free_port()
    log = folder / f"serve-{port}.log"
    command = stepweave("serve", "--port", str(port), "--log-level", "debug", "--log-format", "json", *arguments)
    with running(command, log) as process:
        stack = Stack(process, port, log, host)
        try:
            wait_until(lambda: process.poll() is not None or stack.is_ready(), "the stack is ready")
            assert process.poll() is None, f"serve ended with {process.returncode}"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{log.read_text()[-4000:]}") from error
        yield stack
