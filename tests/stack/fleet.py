"""The services started singly over TCP, as an operator would on several hosts."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import aiohttp

from tests.stack.processes import DEADLINE_S, Stack, free_port, running, stepweave, wait_until

LOGS = ["--log-level", "debug", "--log-format", "json"]


class Fleet:
    """A scheduler and a gateway, and the workers and further gateways that a test starts."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, *scheduler_flags: str) -> None:
        self._folder = folder
        self._stack = stack
        self._scheduler_flags = scheduler_flags
        self._processes: dict[str, Any] = {}
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self._start_scheduler()
        self.gateway = self.start_gateway("gateway")
        self.workers: dict[str, Any] = {}

    def start_gateway(self, name: str) -> Stack:
        port = free_port()
        own = ["gateway", "--scheduler", self.address, "--data-bind", "tcp://127.0.0.1:*", "--port", str(port)]
        process = self._run(name, stepweave(*own, "--name", name, *LOGS))
        return Stack(process, port, self._folder / f"{name}.log")

    def start_worker(self, name: str, *flags: str, program: list[str] | None = None) -> None:
        command = program or stepweave("worker")
        own = ["--scheduler", self.address, "--name", name, "--threads", "1", *LOGS]
        self.workers[name] = self._run(name, [*command, *own, *flags])

    def kill(self, name: str) -> None:
        """SIGKILL; from then on it is no longer expected to be there."""
        process = self._processes.pop(name)
        self.workers.pop(name, None)
        process.kill()
        process.wait()

    def restart_scheduler(self) -> None:
        """SIGKILL, and another at the same address, which then listens."""

        def boots() -> int:
            return sum(line["event"] == "scheduler listens" for line in self.lines_of("scheduler"))

        before = boots()
        self.kill("scheduler")
        self._start_scheduler()
        wait_until(lambda: boots() > before, "the new scheduler listens")

    def _start_scheduler(self) -> None:
        silence = ["--suspect-after-s", "1", "--lost-after-s", "1.5"]
        own = ["scheduler", "--bind", self.address, *silence, *self._scheduler_flags]
        self._run("scheduler", stepweave(*own, *LOGS))

    def wait_for_workers(self) -> None:
        wait_until(lambda: self._live_workers() == len(self.workers), "the workers are there")

    def _live_workers(self) -> int:
        for name, process in self._processes.items():
            assert process.poll() is None, f"the {name} ended:\n{self.log_of(name)}"
        status, body = self.gateway.get("/v1/models")
        return sum(model["workers"] for model in body["data"]) if status == 200 else 0

    def steps_of(self, name: str) -> list[dict[str, Any]]:
        """The worker's log lines of steps."""
        return [line for line in self.lines_of(name) if line["event"] == "step"]

    def lines_of(self, name: str) -> list[dict[str, Any]]:
        """The log lines of a service, of all its lives."""
        lines = self.log_of(name).splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def log_of(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def _run(self, name: str, command: list[str]) -> Any:
        process = self._stack.enter_context(running(command, self._folder / f"{name}.log"))
        self._processes[name] = process
        return process


async def post_all(fleet: Fleet, bodies: list[dict[str, Any]], gateway: Stack | None = None) -> list[tuple[int, Any]]:
    """Status and JSON of each, all posted at once to a gateway, the fleet's first unless told otherwise."""

    async def post(session: aiohttp.ClientSession, asked: dict[str, Any]) -> tuple[int, Any]:
        async with session.post("/v1/images/generations", json=asked) as response:
            return response.status, await response.json()

    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession((gateway or fleet.gateway).url, timeout=timeout) as session:
        return list(await asyncio.gather(*(post(session, asked) for asked in bodies)))
