"""`stepweave serve`: the three services on one machine, as child processes.

Role: start them, wait until a picture can really be had, print how, and end them together. It speaks to them only as a
user would (flags, signals, the gateway's health page). Once the stack was ready, a child that dies is started again;
before, its death ends the start. Children talk over sockets in a folder of their own, so that two
stacks on one machine don't meet; each holds one end of a lifeline pipe and ends when the supervisor is gone.
"""

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import structlog
from msgspec import Struct
from rich.console import Console

from common.config import GatewayConfig, SchedulerConfig, ServeConfig, WorkerConfig
from common.errors import ConfigError
from common.process import LIFELINE_FD_VARIABLE
from common.telemetry import is_console
from services.settings import PREFIX, to_flags

READY_POLL_S = 0.2
STOP_S = 4.0  # from SIGTERM to SIGKILL
RESTART_FIRST_S = 0.5  # until a child that died is started again; doubled each time it dies soon
RESTART_MAX_S = 30.0
STEADY_S = 60.0  # a child that lived so long died for a new reason

log = structlog.get_logger()


class Child(Struct):
    """One service process; `process` is its newest life."""

    name: str
    arguments: list[str]
    process: asyncio.subprocess.Process


async def supervise(config: ServeConfig) -> None:
    """Runs the stack until cancelled. Raises `ConfigError` if a service ends before all of them were ready."""
    _check_port_is_free(config.host, config.port)
    folder = Path(tempfile.mkdtemp(prefix="stepweave-"))
    lifeline_child_end, lifeline_own_end = os.pipe()
    children: list[Child] = []
    ready = asyncio.Event()
    try:
        for name, arguments in commands(config, folder):
            children.append(Child(name, arguments, await start_service(name, arguments, lifeline_child_end)))
        async with asyncio.TaskGroup() as group:
            for child in children:
                group.create_task(_keep_alive(child, lifeline_child_end, ready))
            await _wait_until_ready(config)
            ready.set()
            _say_ready(config)
    except* ConfigError as errors:  # a child's end ends the group
        raise errors.exceptions[0] from None
    finally:
        if is_console(config.log_format):
            Console(stderr=True).print("stopping", highlight=False)
        else:
            log.info("stopping")
        stop = asyncio.ensure_future(_stop(children))
        try:
            await asyncio.shield(stop)
        except asyncio.CancelledError:  # told to stop while it is stopping already: that goes on, with its own outcome
            await stop
        finally:
            os.close(lifeline_own_end)
            os.close(lifeline_child_end)
            shutil.rmtree(folder, ignore_errors=True)


def _check_port_is_free(host: str, port: int) -> None:
    # Asked before anything starts: else a stranger on that port could answer the wait for readiness.
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        with socket.create_server((host, port), family=family):
            pass
    except OSError as error:
        hint = "; choose another with --port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror}{hint}") from error


def commands(config: ServeConfig, folder: Path) -> list[tuple[str, list[str]]]:
    """Name and arguments of each child, in the order in which they start."""
    scheduler_address = f"ipc://{folder}/scheduler"
    ports = config.metrics_ports() or [0] * (2 + config.workers)
    gateway = _shared(config, GatewayConfig) | {
        "scheduler": scheduler_address,
        "data_bind": f"ipc://{folder}/data",
        "metrics_port": ports[0],
    }
    scheduler = _shared(config, SchedulerConfig) | {"bind": scheduler_address, "metrics_port": ports[1]}
    worker = _shared(config, WorkerConfig) | {
        "scheduler": scheduler_address,
        "threads": config.threads or max(1, len(os.sched_getaffinity(0)) // config.workers),
    }
    names = ["worker"] if config.workers == 1 else [f"worker-{index}" for index in range(config.workers)]
    workers = [worker | {"name": name, "metrics_port": port} for name, port in zip(names, ports[2:], strict=True)]
    return [
        ("scheduler", ["scheduler", *to_flags(scheduler)]),
        ("gateway", ["gateway", *to_flags(gateway)]),
        *((name, ["worker", *to_flags(own)]) for name, own in zip(names, workers, strict=True)),
    ]


def _shared(config: ServeConfig, service: type[Struct]) -> dict[str, Any]:
    """What a service's settings share with those of `serve`."""
    return {key: getattr(config, key) for key in service.__struct_fields__ if key in ServeConfig.__struct_fields__}


async def start_service(name: str, arguments: list[str], lifeline: int) -> asyncio.subprocess.Process:
    """Starts a `stepweave` command whose arguments say all: no settings file and no variable adds to them."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.cli",
        *arguments,
        *("--config", os.devnull),
        stdin=asyncio.subprocess.DEVNULL,
        env=environment | {LIFELINE_FD_VARIABLE: str(lifeline)},
        pass_fds=(lifeline,),
        start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then ends them in order
    )
    log.debug("started", child=name, pid=process.pid)
    return process


async def _keep_alive(child: Child, lifeline: int, ready: asyncio.Event) -> None:
    clock = asyncio.get_running_loop().time
    delay_s = RESTART_FIRST_S
    while True:
        born = clock()
        code = await child.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended by itself with exit code {code}"
        if not ready.is_set():
            raise ConfigError(f"the {child.name} {how}{'; its own message is above' if code > 0 else ''}")
        if clock() - born > STEADY_S:
            delay_s = RESTART_FIRST_S
        log.error(f"the {child.name} {how}, it is started again", in_s=delay_s)
        while True:
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, RESTART_MAX_S)
            try:
                child.process = await start_service(child.name, child.arguments, lifeline)
                break
            except OSError as error:  # no memory, no process to be had: the others go on, and it may pass
                log.error(f"the {child.name} can't be started, it is tried again", reason=str(error), in_s=delay_s)


async def _wait_until_ready(config: ServeConfig) -> None:
    url = f"http://{_reachable(config.host)}:{config.port}/health/ready"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        with _say_loading(config):
            while not await _is_ready(session, url):  # noqa: ASYNC110 - another process, which has no event of ours
                await asyncio.sleep(READY_POLL_S)


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):  # it is not listening yet
        return False


# What it says of itself is for people where log lines are, and else a log line.


def _say_loading(config: ServeConfig) -> contextlib.AbstractContextManager[object]:
    """Says it for as long as the context lasts, where that can be shown."""
    console = Console(stderr=True)
    model = config.served_model_name or config.model
    message = f"loading {model} and drawing a warm-up picture"
    if not is_console(config.log_format):
        log.info("loading and drawing a warm-up picture", model=model)
    elif console.is_terminal:
        return console.status(message)
    else:
        console.print(message, highlight=False)
    return contextlib.nullcontext()


def _say_ready(config: ServeConfig) -> None:
    url = f"http://{_reachable(config.host)}:{config.port}"
    if not is_console(config.log_format):
        log.info("Stepweave is ready", url=url)
    if config.log_format != "json":  # where that was asked for, stdout and stderr may be one file
        _print_welcome(config, url)


def _print_welcome(config: ServeConfig, url: str) -> None:
    console = Console()
    console.print(f"\nStepweave is ready at {url}. Try, from another terminal:\n", highlight=False)
    command = sys.argv[0] if Path(sys.argv[0]).name == "stepweave" else "stepweave"
    location = "" if config.port == 8000 else f" --url {url}"
    console.print(f'  {command} generate "red apple" -o apple.png{location}', highlight=False, soft_wrap=True)
    console.print(
        f"  curl -s {url}/v1/images/generations -H 'content-type: application/json' \\\n"
        """    -d '{"prompt": "red apple"}' | python3 -c 'import base64,json,sys; """
        """sys.stdout.buffer.write(base64.b64decode(json.load(sys.stdin)["data"][0]["b64_json"]))' > apple.png\n""",
        highlight=False,
        soft_wrap=True,
    )


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, f"[{host}]" if ":" in host else host)


async def _stop(children: list[Child]) -> None:
    running = [child for child in children if child.process.returncode is None]
    for child in running:
        child.process.terminate()
    waits = [asyncio.ensure_future(child.process.wait()) for child in running]
    if waits:
        await asyncio.wait(waits, timeout=STOP_S)
    for child in running:
        if child.process.returncode is None:
            log.warning("killed, it did not end in time", child=child.name)
            child.process.kill()
            await child.process.wait()
