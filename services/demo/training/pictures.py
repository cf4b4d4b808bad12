"""The things that the demo model learns to draw: which emoji, their names, and pictures of them at any size."""

import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import resvg_py
from PIL import Image

from services.demo.training.sources import CAPTIONS, PICTURES, fetch

# Pictures of one thing with a name that people would type. Left out: most people (near-identical pictures of different
# names), flags, signs, arrows, clock faces, letters, and what differs from a neighbour by a detail too small to draw.
CHOSEN = frozenset(Path(__file__).with_name("things.txt").read_text().splitlines())


@dataclass(frozen=True)
class Thing:
    """One emoji: its ``name`` in lower case, other names, words about it, and its picture as SVG."""

    name: str
    aliases: tuple[str, ...]
    tags: tuple[str, ...]
    svg: str


def name_of(label: str) -> str:
    """A thing's name from its label in the Unicode list."""
    return label.lower().replace("’", "'")


def load_things(cache: Path) -> list[Thing]:
    """The chosen things in the order of the Unicode list, their packages fetched into ``cache`` where needed."""
    words, icons = fetch(CAPTIONS, cache), IconSet(fetch(PICTURES, cache))
    emoji = json.loads((words / "en" / "data.json").read_text())
    codes = json.loads((words / "en" / "shortcodes" / "github.json").read_text())
    things = []
    for entry in emoji:
        label = entry["label"]
        svg = icons.svg_of_character(entry["hexcode"])
        if label not in CHOSEN or svg is None:
            continue
        short = codes.get(entry["hexcode"], ())
        aliases = dict.fromkeys(
            alias.replace("_", " ").replace("-", " ").strip()
            for alias in ([short] if isinstance(short, str) else short)
        )
        name = name_of(label)
        things.append(
            Thing(
                name,
                tuple(alias for alias in aliases if alias != name and len(alias) > 2),
                tuple(tag.lower() for tag in entry.get("tags", ()) if tag.lower() != name),
                svg,
            )
        )
    return things


class IconSet:
    """One set of icons in the format of the ``@iconify-json`` packages, whose folder is given."""

    def __init__(self, package: Path):
        self._set = json.loads((package / "icons.json").read_text())
        characters = package / "chars.json"
        self._characters = json.loads(characters.read_text()) if characters.is_file() else {}

    def svg_of_character(self, hexcode: str) -> str | None:
        """The SVG of one emoji by its code points in hexadecimal, joined by dashes; ``None`` if the set lacks it."""
        code = hexcode.lower()
        name = self._characters.get(code) or self._characters.get(code.replace("-fe0f", ""))
        return self.svg_of_name(name) if name else None

    def svg_of_name(self, name: str) -> str | None:
        """The SVG of one icon by its name; ``None`` if the set lacks it."""
        alias = self._set.get("aliases", {}).get(name)
        icon = self._set["icons"].get(alias["parent"] if alias else name)
        if icon is None:
            return None
        width = icon.get("width", self._set.get("width", 16))
        height = icon.get("height", self._set.get("height", 16))
        box = f"{icon.get('left', 0)} {icon.get('top', 0)} {width} {height}"
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="{box}">{icon["body"]}</svg>'
        )


def render(svg: str, size: int) -> np.ndarray:
    """An SVG as RGBA uint8 (size, size, 4)."""
    png = resvg_py.svg_to_bytes(svg_string=svg, width=size, height=size, skip_system_fonts=True)
    return np.asarray(Image.open(io.BytesIO(bytes(png))).convert("RGBA"))


def on_white(picture: np.ndarray, width: int, height: int, left: int, top: int) -> np.ndarray:
    """An RGBA ``picture`` laid on a white canvas at ``(left, top)``: RGB uint8 (height, width, 3)."""
    canvas = Image.new("RGBA", (width, height), "white")
    canvas.alpha_composite(Image.fromarray(picture), (left, top))
    return np.asarray(canvas.convert("RGB"))
