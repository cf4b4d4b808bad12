"""What the images install and of what, tried in a clean environment where that is cheap."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy import files

DEADLINE_S = 600.0  # to fetch and install some twenty small packages
WORKER_ONLY = ["torch", "diffusers", "transformers", "numpy", "PIL"]
CONTROL = files.stages()["control"]
WORKER = files.stages()["worker"]


class Image:
    """A virtual environment in which a stage's files were copied and its pip commands were run, in their order."""

    def __init__(self, stage: list[files.Instruction], folder: Path) -> None:
        self._folder = folder
        build, elsewhere = folder / "build", folder / "home"
        build.mkdir()
        elsewhere.mkdir()
        self._cwd = build
        self._call(sys.executable, "-m", "venv", str(folder / "venv"))
        for instruction in stage:
            for sources, target in files.copied([instruction]):
                for source in sources:
                    self._copy(files.ROOT / source, build / target)
            for arguments in files.pip_commands([instruction]):
                self.python("-m", "pip", *arguments)
        self._cwd = elsewhere

    def _copy(self, source: Path, target: Path) -> None:
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)

    def python(self, *arguments: str) -> str:
        return self._call(str(self._folder / "venv" / "bin" / "python"), *arguments)

    def stepweave(self, *arguments: str, ends_with: int = 0) -> str:
        return self._call(str(self._folder / "venv" / "bin" / "stepweave"), *arguments, ends_with=ends_with)

    def _call(self, *command: str, ends_with: int = 0) -> str:
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(
            command, cwd=self._cwd, env=environment, check=False, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == ends_with, f"{command}:\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return Image(CONTROL, tmp_path_factory.mktemp("control"))


def test_the_control_image_runs_a_gateway_and_a_scheduler_without_torch(control: Image) -> None:
    for service in ("gateway", "scheduler"):
        assert "--metrics-port" in control.stepweave(service, "--help")
        control.python("-c", f"import services.{service}.{'app' if service == 'gateway' else 'service'}")
    for module in WORKER_ONLY:
        control.python("-c", f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is not None)")


def test_a_worker_in_it_says_what_it_lacks(control: Image) -> None:
    said = control.stepweave("worker", ends_with=1)
    assert "a worker needs" in said
    assert "torch" in said
    assert "Traceback" not in said


def test_what_an_installed_copy_needs_is_installed(control: Image) -> None:
    where = "from services.demo import DEMO_CHECKPOINT as c; print(c)"
    checkpoint = Path(control.python("-c", where).strip())
    assert (checkpoint / "model_index.json").is_file()
    assert checkpoint.is_relative_to(control._folder / "venv"), "it is the installed copy that runs"


def test_its_packages_are_those_of_the_lock(control: Image) -> None:
    locked = set((files.ROOT / "requirements.lock").read_text().lower().split())
    own = {"stepweave", "pip", "setuptools"}
    for line in control.python("-m", "pip", "list", "--format=freeze", "--disable-pip-version-check").split():
        if line.partition("==")[0] not in own:
            assert line.lower().replace("_", "-") in locked, line


def test_the_worker_image_installs_what_make_installs() -> None:
    """To run it, more than a gigabyte for a test, would only show again what this suite runs on: `make` has installed
    by the same line."""
    torch, rest, code = files.pip_commands(WORKER)
    makefile = (files.ROOT / "Makefile").read_text()
    (made,) = re.findall(r"pip install .*(-c requirements\.lock) -e '(\.\[worker\])'", makefile)
    assert rest == ["install", *made[0].split(), made[1]]
    assert torch == ["install", "-c", "requirements.lock", "--no-deps", "--index-url", "$TORCH_INDEX", "torch"]
    assert code == files.pip_commands(CONTROL)[-1] == ["install", "--no-deps", "."]


@pytest.mark.parametrize("stage", ["control", "worker"])
def test_a_change_of_the_code_installs_no_dependency_anew(stage: str) -> None:
    """A layer is made anew where a file was changed that was copied before it."""
    seen: set[str] = set()
    before: list[set[str]] = []  # each call of pip
    for instruction in files.stages()[stage]:
        seen |= {source for sources, _ in files.copied([instruction]) for source in sources}
        before += [set(seen) for _ in files.pip_commands([instruction])]
    *dependencies, code = before
    assert all(each == {"pyproject.toml", "requirements.lock", "LICENSE"} for each in dependencies)
    assert code == {*dependencies[0], "README.md", "common", "services"}


def test_docker_is_given_what_is_copied_and_no_more() -> None:
    ignore = [line for line in (files.ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert ignore[0] == "*"
    given = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert given == {source for sources, _ in files.copied(CONTROL + WORKER) for source in sources}


@pytest.mark.parametrize("stage", ["control", "worker"])
def test_an_image_runs_stepweave_as_nobody_in_particular(stage: str) -> None:
    instructions = files.stages()[stage]
    assert instructions[0].arguments == "python:3.11-slim AS base"
    last = {each.name: each.arguments for each in instructions}
    assert last["USER"] == "stepweave"
    assert last["ENTRYPOINT"] == '["stepweave"]'
    assert last["STOPSIGNAL"] == "SIGTERM"
    users = [index for index, each in enumerate(instructions) if each.name == "USER"]
    assert not any(each.name in ("RUN", "COPY") for each in instructions[users[0] :])
