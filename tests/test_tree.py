"""What holds for the whole tree: declared imports, no `TYPE_CHECKING`, no pickle."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OWN = {"common", "services", "bench", "deploy", "tests"}
SOURCES = [path for package in sorted(OWN) for path in sorted((ROOT / package).rglob("*.py"))]
WORKER_ONLY = (ROOT / "services" / "worker", ROOT / "deploy")
TRAINING = ROOT / "services" / "demo" / "training"


def declared(*extras: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + [r for e in extras for r in project["optional-dependencies"][e]]
    return {normalised(re.split(r"[<>=\[; ]", requirement)[0]) for requirement in requirements}


def normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_imported_that_is_not_declared(path: Path) -> None:
    if path.is_relative_to(ROOT / "tests") or path.is_relative_to(ROOT / "bench"):
        allowed = declared("worker", "train", "bench", "dev")
    elif path.is_relative_to(TRAINING):
        allowed = declared("worker", "train")
    elif any(path.is_relative_to(folder) for folder in WORKER_ONLY):
        allowed = declared("worker")
    else:
        allowed = declared()
    distributions = importlib.metadata.packages_distributions()
    for module in set(imports(path)) - OWN - sys.stdlib_module_names:
        assert {normalised(name) for name in distributions[module]} & allowed, f"{module} is not declared"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_import_is_for_type_checking_only_and_none_is_pickle(path: Path) -> None:
    names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
    assert "TYPE_CHECKING" not in names, "the direction of that import is wrong"
    assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & set(imports(path))


def test_every_dependency_is_pinned_in_the_lock() -> None:
    locked = {normalised(line.partition("==")[0]) for line in (ROOT / "requirements.lock").read_text().splitlines()}
    assert declared("worker", "train", "bench", "dev") <= locked
