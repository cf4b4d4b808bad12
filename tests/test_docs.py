"""The documents say what the code does."""

import re
import tomllib
from pathlib import Path

import typer.main

from common import messages as m
from services import cli
from services.scheduler.request import render_lifecycle

ROOT = Path(__file__).parent.parent
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
README = (ROOT / "README.md").read_text()


def section(name: str) -> str:
    """The text of ARCHITECTURE.md between a pair of marks."""
    return ARCHITECTURE.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]


def test_the_lifecycle_diagram_is_the_transition_table() -> None:
    assert section("lifecycle").strip() == f"```mermaid\n{render_lifecycle().strip()}\n```"


def test_every_message_is_in_the_table() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", ARCHITECTURE, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {kind.__name__ for kind in m.Message.__subclasses__()} <= named


def test_the_file_table_lists_every_module_and_no_other() -> None:
    listed = set(re.findall(r"^\| `([^`]*\.py)` \|", section("files"), flags=re.MULTILINE))
    modules = {
        str(path.relative_to(ROOT))
        for package in ("common", "services", "bench")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert listed == modules


def test_the_readme_has_every_flag_of_serve() -> None:
    serve = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    flags = {option for parameter in serve.params for option in parameter.opts} - {"--help"}
    assert flags <= set(re.findall(r"--[a-z-]+", README))


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]
    reasons = section("libraries")
    for requirement in requirements:
        name = re.split(r"[<>=]", requirement)[0]
        assert f"`{name}`" in reasons, name
