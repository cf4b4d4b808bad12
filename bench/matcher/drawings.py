"""What the matcher is trained on: the things of the demo checkpoint as other emoji sets draw them."""

import unicodedata
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.matcher.model import COLOUR_WORDS, SIZE, split_caption
from services.demo.training.colours import COLOURS, main_colour, recolour
from services.demo.training.pictures import IconSet, Thing, on_white, render
from services.demo.training.sources import Package, fetch

# The first design of Noto Emoji (Apache-2.0), whose drawings are others than those that the generator learns.
NOTO_V1 = Package(
    "@iconify-json/noto-v1",
    "1.2.5",
    "sha512-/DsVMius69Q0fRS53z7QK1TROSuar606jiIx+laXtdsYGMXpf6LtHBx6CGfoo3UHHb/XpBsw+1L1x3eyPqMuVA==",
)
SETS = (
    # Twemoji (CC BY 4.0).
    Package(
        "@iconify-json/twemoji",
        "1.2.5",
        "sha512-uKpuIEV0v6K5BW3Mjdyl+XKFVAbbcPxAgifKvEMtZoUZB5+YiY5zaMm2uNNCxyXzAWU9yNLlj41WU6/mvgALsw==",
    ),
    # Fluent UI Emoji, flat (MIT).
    Package(
        "@iconify-json/fluent-emoji-flat",
        "1.2.6",
        "sha512-RY47RgPb47fYUiyrA64sIOL0+UU02s29sXpNBbIQRBUlPlfNFTKUmZDERGuxDs/7yNGWqQYvuaSYM1M4fRXlUw==",
    ),
    # Emoji One 2 (CC BY 4.0).
    Package(
        "@iconify-json/emojione",
        "1.2.3",
        "sha512-T9+T3HIbJNLKKsmxYKlaYhvnHYkz/HNYTV7SHCXVZPfeUi4FqskY70YeN8yYAZT8cCv7w5vJxS4Q1m8zb9CMMg==",
    ),
    # Firefox OS Emoji (Apache-2.0).
    Package(
        "@iconify-json/fxemoji",
        "1.2.2",
        "sha512-UAasRaxzFUKfIGSmLwnoarsssA4LX0VLLuEmplIqM6ZNQqIQRtav8tZ4H1neTlBreXuMQyAifr5jP4kn78DpiQ==",
    ),
    NOTO_V1,
)
# The only ones that the second design of Noto Emoji kept (nearly) as they were: the generator learns those.
KEPT_BY_NOTO = frozenset(("comet", "tornado", "large orange diamond", "cloud", "crescent moon"))
UNKNOWN = -1  # in place of a colour: the thing's own, which no word is given for


@dataclass(frozen=True)
class Drawings:
    """Pictures on white, RGB uint8 (P, SIZE, SIZE, 3), with what they show as int64 (P,).

    ``nouns`` counts in ``names``, ``colours`` in ``COLOUR_WORDS`` or is ``UNKNOWN``. The first ``plain`` pictures are
    as they were drawn, the others recoloured.
    """

    names: tuple[str, ...]
    pictures: np.ndarray
    nouns: np.ndarray
    colours: np.ndarray
    plain: int


def load_drawings(things: list[Thing], folder: Path) -> Drawings:
    """All drawings of ``things``, in their own colours and in all others; the packages are fetched into ``folder``."""
    nouns = [split_caption(thing.name)[1] for thing in things]
    names = tuple(dict.fromkeys(nouns))
    plain, recoloured = [], []
    for package in SETS:
        icons = IconSet(fetch(package, folder))
        for index, svg in _drawn(things, icons):
            if package is NOTO_V1 and things[index].name in KEPT_BY_NOTO:
                continue
            noun, picture = names.index(nouns[index]), render(svg, SIZE)
            own, main = split_caption(things[index].name)[0], main_colour(picture)
            plain.append((noun, COLOUR_WORDS.index(own) if own else UNKNOWN, picture))
            for word in COLOURS if main else ():
                recoloured.append((noun, COLOUR_WORDS.index(word), recolour(picture, main, word)))
    every = plain + recoloured
    return Drawings(
        names,
        np.stack([on_white(picture, SIZE, SIZE, 0, 0) for _, _, picture in every]),
        np.array([noun for noun, _, _ in every]),
        np.array([colour for _, colour, _ in every]),
        len(plain),
    )


def _drawn(things: list[Thing], icons: IconSet) -> list[tuple[int, str]]:
    """The things that a set draws, as indices, with the SVG."""
    taken = {thing.name for thing in things}
    found = []
    for index, thing in enumerate(things):
        words = (thing.name, *(alias for alias in thing.aliases if alias not in taken))
        svgs = (icons.svg_of_name(name) for word in words for name in _icon_names(word))
        svg = next((svg for svg in svgs if svg), None)
        if svg:
            found.append((index, svg))
    return found


def _icon_names(word: str) -> tuple[str, str]:
    """The two ways in which the sets make a name of an icon of a ``word``: with dashes and without."""
    plain = unicodedata.normalize("NFKD", word).encode("ascii", "ignore").decode().replace("'", "")
    dashed = plain.replace(" ", "-")
    return dashed, dashed.replace("-", "")
