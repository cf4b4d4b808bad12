"""The container and metrics files, read."""

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from common.config import GatewayConfig, SchedulerConfig, WorkerConfig
from services.settings import NO_FILE, resolve

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"


class Instruction(NamedTuple):
    """One line of a Dockerfile."""

    name: str
    arguments: str


@cache
def stages() -> dict[str, list[Instruction]]:
    """The instructions of each stage, those of the stage that it is built from first."""
    found: dict[str, list[Instruction]] = {}
    for line in (DEPLOY / "Dockerfile").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        assert not line.endswith("\\"), "this reader knows no continued lines"
        name, _, arguments = line.partition(" ")
        if name == "FROM":
            base, _, stage = arguments.partition(" AS ")
            found[stage] = list(found.get(base, []))
        found[stage].append(Instruction(name, arguments))
    return found


def copied(stage: list[Instruction]) -> list[tuple[list[str], str]]:
    """What a stage copies from the tree: the sources and the target of each COPY."""
    pieces = [shlex.split(each.arguments) for each in stage if each.name == "COPY"]
    return [(sources, target) for *sources, target in pieces]


def pip_commands(stage: list[Instruction]) -> list[list[str]]:
    """The arguments of each call of pip, in order."""
    commands = [shlex.split(each.arguments) for each in stage if each.name == "RUN"]
    return [command[1:] for command in commands if command[0] == "pip"]


@cache
def compose() -> dict[str, Any]:
    content = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert isinstance(content, dict)
    return content


def services() -> dict[str, dict[str, Any]]:
    return dict(compose()["services"])


def our_services() -> dict[str, dict[str, Any]]:
    """Those that are built here."""
    return {name: service for name, service in services().items() if "build" in service}


def flags(service: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """The command of a service, and its flags by the names of their settings."""
    command, *arguments = shlex.split(service["command"])
    names = [flag.removeprefix("--").replace("-", "_") for flag in arguments[::2]]
    return command, dict(zip(names, arguments[1::2], strict=True))


def config(service: dict[str, Any]) -> GatewayConfig | SchedulerConfig | WorkerConfig:
    """What a service makes of its flags; it refuses what it can't use."""
    command, given = flags(service)
    made = resolve(command, given, {}, NO_FILE).config
    assert isinstance(made, GatewayConfig | SchedulerConfig | WorkerConfig)
    return made


def healthcheck_url(service: dict[str, Any]) -> str:
    kind, program, option, code = service["healthcheck"]["test"]
    assert (kind, program, option) == ("CMD", "python", "-c")
    compile(code, "healthcheck", "exec")
    match = re.search(r"'(http://[^']+)'", code)
    assert match is not None, code
    return match[1]
