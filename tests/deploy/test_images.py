"""What the images install and of what, tried in a clean environment. The worker's is in a file of its own, since it is
large and test files run side by side."""

from pathlib import Path

import pytest

from tests.deploy import files
from tests.deploy.image import Image

WORKER_ONLY = ["torch", "diffusers", "transformers", "numpy", "PIL"]
CONTROL = files.stages()["control"]
WORKER = files.stages()["worker"]


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
