"""Pictures as training sees them: a thing, in its own colours or another, on a canvas of some size."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from services.demo.training.captions import colours_to_learn
from services.demo.training.colours import main_colour, recolour
from services.demo.training.pictures import Thing, on_white, render

RECOLOURED_SHARE = 0.3
FLIPPED_SHARE = 0.3


@dataclass(frozen=True)
class View:
    """One picture to learn: ``colour`` is ``None`` for the thing's own."""

    thing: int
    colour: str | None
    width: int
    height: int
    flipped: bool
    fill: float
    left: float
    top: float


class PictureBook:
    """All things, rendered and recoloured on demand."""

    def __init__(self, things: list[Thing], held_out: frozenset[tuple[str, str]]):
        self.things = things
        self._main = [main_colour(render(thing.svg, 64)) for thing in things]
        allowed = colours_to_learn(things, held_out)
        self.colours = [colours if main else () for colours, main in zip(allowed, self._main, strict=True)]
        self._render = lru_cache(maxsize=8192)(self._rendered)

    def _rendered(self, thing: int, size: int) -> np.ndarray:
        return render(self.things[thing].svg, size)

    def draw(self, view: View) -> np.ndarray:
        """The picture of a view: RGB uint8 (height, width, 3)."""
        size = round(min(view.width, view.height) * view.fill)
        picture = self._render(view.thing, size)
        if view.colour:
            picture = recolour(picture, self._main[view.thing], view.colour)
        if view.flipped:
            picture = np.ascontiguousarray(picture[:, ::-1])
        left, top = round((view.width - size) * view.left), round((view.height - size) * view.top)
        return on_white(picture, view.width, view.height, left, top)

    def view(self, random: np.random.Generator, width: int, height: int) -> View:
        """A random thing on a canvas of ``width`` by ``height``, about in the middle."""
        thing = int(random.integers(len(self.things)))
        colours = self.colours[thing]
        recoloured = bool(colours) and random.random() < RECOLOURED_SHARE
        return View(
            thing,
            colours[int(random.integers(len(colours)))] if recoloured else None,
            width,
            height,
            flipped=random.random() < FLIPPED_SHARE,
            fill=random.choice((0.875, 0.9375, 1.0)),
            left=0.5 + 0.3 * (random.random() - 0.5),
            top=0.5 + 0.3 * (random.random() - 0.5),
        )

    def crop(self, random: np.random.Generator, size: int) -> np.ndarray:
        """A random square piece of a random view of a random size: RGB uint8 (size, size, 3)."""
        whole = max(size, int(random.choice((64, 96, 128))))
        picture = self.draw(self.view(random, whole, whole))
        top, left = (int(random.integers(whole - size + 1)) for _ in range(2))
        return picture[top : top + size, left : left + size]
