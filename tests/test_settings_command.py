"""The command line's settings: `stepweave config`, errors as a user sees them, and the children of `serve`."""

import io
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec.structs import fields
from rich.console import Console
from typer.testing import CliRunner

from common.config import SchedulerConfig, ServeConfig
from services import cli, supervisor
from services.settings import (
    COMMANDS,
    DEFAULT_FILE,
    FILE_VARIABLE,
    KEYS,
    NO_FILE,
    VARIABLES,
    Settings,
    resolve,
    to_flags,
    to_toml,
)
from services.settings_view import as_file, print_settings
from tests import docs
from tests.settings_doors import as_flags, as_variables, other_values, written


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # where there is no default file
    for name in list(os.environ):
        if name.startswith("STEPWEAVE_"):
            monkeypatch.delenv(name)


def shown(*arguments: str) -> dict[str, tuple[Any, str]]:
    """What `stepweave config` prints: value and whence, by key of its only command."""
    result = CliRunner().invoke(cli.app, ["config", *arguments])
    assert result.exit_code == 0, result.exception or result.output
    values = next(iter(tomllib.loads(result.stdout).values()))
    whence = [line.rpartition("# ")[2] for line in result.stdout.removesuffix("\n").split("\n")]
    return {key: (value, place) for (key, value), place in zip(values.items(), whence, strict=True)}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_setting_has_a_flag(command: str) -> None:
    values = other_values(command)
    printed = shown(command, *to_flags(values))
    assert {key: value for key, (value, _) in printed.items()} == values
    assert all(place.startswith("--") for _, place in printed.values())


@pytest.mark.parametrize("arguments", [(), ("--toml",)])
def test_what_config_prints_is_a_file_that_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    environ: dict[str, str] = {}
    for command in COMMANDS:
        environ |= as_variables(command, other_values(command))
    records = {command: resolve(command, {}, environ, NO_FILE).config for command in COMMANDS}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    printed = CliRunner().invoke(cli.app, ["config", *arguments])
    assert printed.exit_code == 0, printed.exception
    file = written(tmp_path, printed.stdout)
    assert {command: resolve(command, {}, {}, file).config for command in COMMANDS} == records


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_to_start_from_shows_every_setting_and_changes_none(tmp_path: Path, command: str) -> None:
    printed = CliRunner().invoke(cli.app, ["config", command, "--toml"]).stdout
    untouched = resolve(command, {}, {}, written(tmp_path, printed))
    assert {setting.door for setting in untouched.settings} == {"default"}
    every_line = re.sub(r"^# (\w+ = )", r"\1", printed, flags=re.MULTILINE)
    read = resolve(command, {}, {}, written(tmp_path, every_line))
    assert {setting.door for setting in read.settings} == {"file"}
    assert read.config == untouched.config


def test_config_says_whence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / DEFAULT_FILE).write_text("[serve]\n# why\nmax_queue = 7")
    monkeypatch.setenv("STEPWEAVE_SERVE_HOST", "::1")
    printed = shown("serve", "--port", "9000", "--no-step-execution")
    assert printed["port"] == (9000, "--port")
    assert printed["step_execution"] == (False, "--no-step-execution")
    assert printed["host"] == ("::1", "STEPWEAVE_SERVE_HOST")
    assert printed["max_queue"] == (7, "stepweave.toml:3")
    assert printed["workers"] == (1, "default")


def test_options_before_the_name_of_a_command_count_too(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[gateway]\nport = 1")
    result = CliRunner().invoke(cli.app, ["config", "--toml", "--config", "a.toml", "gateway"])
    assert "port = 1  # a.toml:2" in result.stdout


def test_a_terminal_gets_a_table_with_every_character_of_a_value() -> None:
    address = "tcp://[::1]:5570"  # which rich would take for markup
    settings = resolve("gateway", {"scheduler": address, "name": "x" * 200}, {}, NO_FILE)
    text = io.StringIO()
    print_settings([settings], Console(file=text, force_terminal=True, width=80, color_system=None))
    lines = text.getvalue().splitlines()
    assert any(f'"{address}"' in line and "--scheduler" in line for line in lines)
    assert sum(line.count("x") for line in lines) >= 200
    assert all(any(key in line for line in lines) for key in KEYS["gateway"])


@given(st.text() | st.integers() | st.booleans() | st.floats(allow_nan=False))
def test_toml_reads_what_is_written(value: object) -> None:
    assert tomllib.loads(f"key = {to_toml(value)}") == {"key": value}


@hypothesis_settings(max_examples=20)
@example("a\u2028b\x85c # d")
@example("--")
@given(st.text(min_size=1).filter(lambda text: "\0" not in text))
def test_any_string_goes_to_a_child_by_a_flag_and_to_a_file_unchanged(model: str) -> None:
    settings = resolve("worker", {"model": model}, {}, NO_FILE)
    assert tomllib.loads(as_file([settings]))["worker"] == {"model": model}
    assert shown("worker", *to_flags({"model": model}))["model"][0] == model


# The command itself, and the children of `serve`.


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", *arguments]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=60, cwd=docs.ROOT, env=os.environ | environ
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_fault_stops_the_start_with_one_line(command: str) -> None:
    for done in (run(command, "--metrics-port", "x"), run(command, STEPWEAVE_CONFIG="/no/such/file")):
        assert done.returncode == 1
        assert re.fullmatch(r"stepweave: .*(metrics_port must be|/no/such/file).*\n", done.stderr)
        assert done.stdout == ""


def test_an_unknown_flag_names_the_nearest() -> None:
    done = run("serve", "--max-quue", "1")
    assert done.returncode != 0
    assert "--max-queue" in done.stderr


SERVED = [
    resolve("serve", as_flags(other_values("serve")), {}, NO_FILE),
    resolve("serve", {"metrics_port": "9100", "workers": "3"}, {}, NO_FILE),
    resolve("serve", {"model": "-x", "served_model_name": "", "threads": "1"}, {}, NO_FILE),
]


@pytest.mark.parametrize("served", SERVED, ids=["all", "metrics", "odd"])
def test_children_get_what_serve_was_told(served: Settings, tmp_path: Path) -> None:
    serve: ServeConfig = served.config
    services: list[Any] = []
    for _, (command, *flags) in supervisor.commands(serve, tmp_path):
        values = {key: value for key, (value, _) in shown(command, *flags).items()}
        services.append(msgspec.convert(values, COMMANDS[command]))
    for service in services:
        for field in fields(ServeConfig):
            if field.name in service.__struct_fields__ and field.name not in ("metrics_port", "threads"):
                assert getattr(service, field.name) == getattr(serve, field.name), field.name
    scheduler, gateway, *workers = services
    assert len(workers) == serve.workers
    assert all(service.threads == serve.threads or service.threads > 0 == serve.threads for service in workers)
    assert [gateway.metrics_port, scheduler.metrics_port, *(each.metrics_port for each in workers)] == (
        list(serve.metrics_ports()) or [0] * (2 + serve.workers)
    )
    assert scheduler.bind == gateway.scheduler == workers[0].scheduler
    assert len({worker.name for worker in workers}) == serve.workers


async def test_a_child_reads_no_file_and_no_variable_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / DEFAULT_FILE).write_text("[scheduler]\nmax_queue = 7")
    monkeypatch.setenv("STEPWEAVE_SCHEDULER_MAX_ATTEMPTS", "7")
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / DEFAULT_FILE))
    monkeypatch.setenv("PYTHONPATH", str(docs.ROOT))
    lifeline, own_end = os.pipe()
    child = await supervisor.start_service("scheduler", ["config", "scheduler"], lifeline)
    assert await child.wait() == 0
    os.close(lifeline)
    os.close(own_end)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("scheduler.")]  # others are logs
    assert tomllib.loads("\n".join(lines))["scheduler"] == msgspec.to_builtins(SchedulerConfig())


# The README.


def test_the_readmes_settings_file_is_right(tmp_path: Path) -> None:
    readme = (docs.ROOT / "README.md").read_text()
    (text,) = re.findall(r"```toml\n(.*?)```", readme, flags=re.DOTALL)
    file = written(tmp_path, text)
    assert file.tables
    for command in COMMANDS:
        resolve(command, {}, {}, file)
    for name in re.findall(r"STEPWEAVE_[A-Z_]+[A-Z]", readme):
        assert name in VARIABLES or name == FILE_VARIABLE or name.endswith("_SERVICE_HOST"), name
