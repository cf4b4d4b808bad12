"""The parts of ARCHITECTURE.md that are drawn from the code: `python -m tests.docs` writes them."""

import ast
import re
from pathlib import Path

from services.scheduler.request import render_lifecycle

ROOT = Path(__file__).parent.parent
ARCHITECTURE = ROOT / "ARCHITECTURE.md"


def section(text: str, name: str) -> str:
    """What stands between a pair of marks."""
    match = re.search(f"<!-- {name} -->\n(.*?)<!-- /{name} -->", text, flags=re.DOTALL)
    assert match is not None, f"ARCHITECTURE.md has no section {name!r}"
    return match[1]


def rendered() -> dict[str, str]:
    """Each drawn section as it should be."""
    return {"lifecycle": f"\n```mermaid\n{render_lifecycle().strip()}\n```\n", "files": f"\n{_file_table()}\n"}


def _file_table() -> str:
    """Every module and the first paragraph of its docstring."""
    rows = ["| file | purpose |", "|---|---|"]
    for package in ("common", "services", "bench", "deploy"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "__init__.py":
                docstring = ast.get_docstring(ast.parse(path.read_text()))
                assert docstring, f"{path} does not say what it is"
                purpose = " ".join(docstring.partition("\n\n")[0].split())
                rows.append(f"| `{path.relative_to(ROOT)}` | {purpose} |")
    return "\n".join(rows)


def main() -> None:
    text = ARCHITECTURE.read_text()
    for name, body in rendered().items():
        text = text.replace(section(text, name), body)
    ARCHITECTURE.write_text(text)


if __name__ == "__main__":
    main()
