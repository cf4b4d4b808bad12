"""The pictures that the prompts ask for, as the generator's own emoji set has them: no generator can do better.

``python -m bench.matcher.real FOLDER`` writes them beside this program, so that measuring needs no packages.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from PIL import Image

from bench.matcher.model import SIZE
from bench.matcher.prompts import PROMPTS
from services.demo.training.colours import main_colour, recolour
from services.demo.training.pictures import load_things, on_white, render

SHEET = Path(__file__).with_name("real.png")
COLUMNS = 8


def real_pictures() -> np.ndarray:
    """The real pictures in the order of ``PROMPTS``: RGB uint8 (64, SIZE, SIZE, 3)."""
    sheet = np.asarray(Image.open(SHEET).convert("RGB"))
    rows = sheet.reshape(-1, SIZE, COLUMNS, SIZE, 3).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(rows.reshape(-1, SIZE, SIZE, 3))


def main(folder: Annotated[Path, typer.Argument(help="Where the fetched packages are kept.")]) -> None:
    """Render and recolour the real pictures into one sheet."""
    svgs = {thing.name: thing.svg for thing in load_things(folder)}
    sheet = Image.new("RGB", (COLUMNS * SIZE, len(PROMPTS) // COLUMNS * SIZE))
    for number, prompt in enumerate(PROMPTS):
        picture = render(svgs[prompt.thing], SIZE)
        if prompt.colour:
            picture = recolour(picture, main_colour(picture), prompt.colour)
        place = (number % COLUMNS * SIZE, number // COLUMNS * SIZE)
        sheet.paste(Image.fromarray(on_white(picture, SIZE, SIZE, 0, 0)), place)
    sheet.save(SHEET, optimize=True)


if __name__ == "__main__":
    typer.run(main)
