"""``python -m tests.checkpoints FOLDER [NAME…]``: writes the tiny checkpoints, each into a folder of its own name."""

from pathlib import Path
from typing import Annotated

import typer

from services.worker import prepare_environment


def main(
    folder: Annotated[Path, typer.Argument(help="Where to; it is made if need be.", file_okay=False)],
    names: Annotated[list[str] | None, typer.Argument(help="Which.", show_default="all")] = None,
) -> None:
    """Write tiny checkpoints of the real classes, for trying a family out without its weights."""
    prepare_environment()  # before torch is imported, which reads it once
    from services.demo.training.progress import steps as progress
    from tests.checkpoints import CHECKPOINTS

    asked = names or list(CHECKPOINTS)
    unknown = [name for name in asked if name not in CHECKPOINTS]
    if unknown:
        raise typer.BadParameter(f"there is no checkpoint {unknown[0]!r}; there are {', '.join(CHECKPOINTS)}")
    for number in progress("writing", 0, len(asked)):
        CHECKPOINTS[asked[number]](folder / asked[number])
        typer.echo(folder / asked[number])


if __name__ == "__main__":
    typer.run(main)
