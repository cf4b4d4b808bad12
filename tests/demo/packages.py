"""A few things in the format of the packages that the training fetches, so that tests need no network."""

import json
from pathlib import Path

from services.demo.training.sources import CAPTIONS, PICTURES, Package

THINGS = {
    "red apple": ("1F34E", "apple", ["fruit", "red"], '<circle cx="64" cy="70" r="50" fill="#e03020"/>'),
    "green apple": ("1F34F", "green_apple", ["fruit"], '<circle cx="64" cy="70" r="50" fill="#60b030"/>'),
    "frog": ("1F438", "frog", ["face"], '<ellipse cx="64" cy="70" rx="56" ry="40" fill="#40a040"/>'),
    "star": ("2B50", "star", [], '<path d="M64 6 L84 120 L6 46 L122 46 L44 120 Z" fill="#f0c020"/>'),
    "elephant": ("1F418", "elephant", [], '<rect x="20" y="30" width="90" height="60" fill="#909090"/>'),
}


def write_packages(cache: Path) -> None:
    """Puts both packages into ``cache``, as an earlier fetch would have left them."""
    emoji = [{"label": name, "hexcode": code, "tags": tags} for name, (code, _, tags, _) in THINGS.items()]
    _write(cache, CAPTIONS, "en/data.json", emoji)
    _write(cache, CAPTIONS, "en/shortcodes/github.json", {code: alias for code, alias, _, _ in THINGS.values()})
    icons = {name.replace(" ", "-"): {"body": body} for name, (_, _, _, body) in THINGS.items()}
    _write(cache, PICTURES, "icons.json", {"icons": icons, "width": 128, "height": 128})
    codes = {code.lower(): name.replace(" ", "-") for name, (code, _, _, _) in THINGS.items()}
    _write(cache, PICTURES, "chars.json", codes)


def _write(cache: Path, package: Package, name: str, content: object) -> None:
    file = package.folder(cache) / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
