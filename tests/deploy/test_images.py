"""What the images install, tried in a clean environment where that is cheap."""

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
    """A virtual environment into which a stage's files were copied and its pip commands were run."""

    def __init__(self, stage: list[files.Instruction], folder: Path) -> None:
        self._folder = folder
        build, elsewhere = folder / "build", folder / "home"
        build.mkdir()
        elsewhere.mkdir()
        self._cwd = build
        for sources, target in files.copied(stage):
            for source in sources:
                if (files.ROOT / source).is_dir():
                    shutil.copytree(files.ROOT / source, build / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(files.ROOT / source, build / target)
        self._call(sys.executable, "-m", "venv", str(folder / "venv"))
        for arguments in files.pip_commands(stage):
            self.python("-m", "pip", *arguments)
        self._cwd = elsewhere

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
    torch, rest = files.pip_commands(WORKER)
    makefile = (files.ROOT / "Makefile").read_text()
    (made,) = re.findall(r"pip install .*(-c requirements\.lock) -e '(\.\[worker\])'", makefile)
    assert rest == ["install", *made[0].split(), made[1]]
    assert torch == ["install", "-c", "requirements.lock", "--no-deps", "--index-url", "$TORCH_INDEX", "torch"]


def test_the_worker_image_has_all_files_before_the_step_that_reads_them() -> None:
    needed = {source for sources, _ in files.copied(CONTROL) for source in sources}
    assert {source for sources, _ in files.copied(WORKER) for source in sources} == needed
    seen: set[str] = set()
    for instruction in WORKER:
        if instruction.name == "COPY":
            seen |= set(instruction.arguments.split()[:-1])
        elif instruction.name == "RUN" and "pip install" in instruction.arguments:
            assert "requirements.lock" in seen
            assert "torch" in instruction.arguments or seen == needed


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
