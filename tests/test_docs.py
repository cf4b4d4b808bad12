"""The documents say what the code does."""

import re
import tomllib

import pytest
import typer.main

from common import messages as m
from services import cli
from tests import docs

ARCHITECTURE = docs.ARCHITECTURE.read_text()
README = (docs.ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", docs.rendered())
def test_what_is_drawn_from_the_code_is_as_the_code_is(name: str) -> None:
    assert docs.section(ARCHITECTURE, name) == docs.rendered()[name], "run `python -m tests.docs`"


def test_every_message_is_in_the_table() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", ARCHITECTURE, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {kind.__name__ for kind in m.Message.__subclasses__()} <= named


def test_the_readme_has_every_flag_of_serve() -> None:
    serve = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    flags = {option for parameter in serve.params for option in parameter.opts} - {"--help"}
    assert flags <= set(re.findall(r"--[a-z-]+", README))


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((docs.ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]
    reasons = docs.section(ARCHITECTURE, "libraries")
    for requirement in requirements:
        name = re.split(r"[<>=]", requirement)[0]
        assert f"`{name}`" in reasons, name
