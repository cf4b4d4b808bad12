"""The same picture in another colour, named by a colour word.

The recoloured pictures teach that a colour word and a thing's name combine: "blue frog" is in no emoji set.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Colour:
    """A colour of the surface of a thing: its hue in turns, its typical saturation and value from 0 to 1."""

    hue: float
    saturation: float
    value: float


# Without white: the pictures stand on white.
COLOURS = {
    "red": Colour(0.99, 0.85, 0.88),
    "orange": Colour(0.08, 0.88, 0.97),
    "yellow": Colour(0.145, 0.80, 0.98),
    "green": Colour(0.34, 0.72, 0.70),
    "blue": Colour(0.60, 0.75, 0.88),
    "purple": Colour(0.77, 0.62, 0.72),
    "pink": Colour(0.93, 0.42, 0.98),
    "brown": Colour(0.06, 0.62, 0.48),
    "black": Colour(0.0, 0.0, 0.20),
    "grey": Colour(0.0, 0.0, 0.60),
}
MAIN_SHARE = 0.45  # of the thing's area: with less in one colour, no single colour word describes it
HUE_BINS = 48
HUE_WIDTH = 0.09  # turns to each side of the main hue that move with it


def main_colour(picture: np.ndarray) -> Colour | None:
    """The colour that covers most of an RGBA uint8 ``picture`` (H, W, 4); ``None`` if it has several, or only greys."""
    hue, saturation, value = _hsv(picture)
    opaque = picture[..., 3] > 128
    vivid = opaque & (saturation > 0.25) & (value > 0.2)
    if not vivid.any():
        return None
    weights, _ = np.histogram(hue[vivid], bins=HUE_BINS, range=(0, 1), weights=(saturation * value)[vivid])
    smooth = weights + np.roll(weights, 1) + np.roll(weights, -1)
    main = (int(smooth.argmax()) + 0.5) / HUE_BINS
    near = vivid & (_hue_distance(hue, main) < HUE_WIDTH)
    if near.sum() < MAIN_SHARE * opaque.sum():
        return None
    return Colour(main, float(np.median(saturation[near])), float(np.median(value[near])))


def recolour(picture: np.ndarray, main: Colour, word: str) -> np.ndarray:
    """An RGBA uint8 ``picture`` (H, W, 4) with its ``main`` colour moved to ``word``; shading and the rest stay."""
    target = COLOURS[word]
    hue, saturation, value = _hsv(picture)
    # Soft at the edge of the range of hues, so that no outline of the old colour is left.
    amount = np.clip((1.6 * HUE_WIDTH - _hue_distance(hue, main.hue)) / (0.6 * HUE_WIDTH), 0, 1) * (saturation > 0.08)
    new = _rgb(
        (target.hue + 0.5 * _signed_hue_distance(hue, main.hue)) % 1.0,
        np.clip(saturation * target.saturation / main.saturation, 0, 1),
        np.clip(value * target.value / main.value, 0, 1),
    )
    old = picture[..., :3].astype(np.float32) / 255
    mixed = old + amount[..., None] * (new - old)
    return np.concatenate([(mixed * 255).round().astype(np.uint8), picture[..., 3:]], axis=-1)


def _hue_distance(hue, other):
    return np.abs(_signed_hue_distance(hue, other))


def _signed_hue_distance(hue, other):
    return (hue - other + 0.5) % 1.0 - 0.5


def _hsv(picture: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rgb = picture[..., :3].astype(np.float32) / 255
    high, low = rgb.max(axis=-1), rgb.min(axis=-1)
    spread = high - low
    safe = np.where(spread == 0, 1, spread)
    red, green, blue = rgb[..., 0], rgb[..., 1], rgb[..., 2]
    sector = np.select(
        [high == red, high == green],
        [((green - blue) / safe) % 6, (blue - red) / safe + 2],
        (red - green) / safe + 4,
    )
    return np.where(spread == 0, 0, sector / 6), np.where(high == 0, 0, spread / np.where(high == 0, 1, high)), high


def _rgb(hue: np.ndarray, saturation: np.ndarray, value: np.ndarray) -> np.ndarray:
    def channel(offset: float) -> np.ndarray:
        place = (offset + hue * 6) % 6
        return value - value * saturation * np.clip(np.minimum(place, 4 - place), 0, 1)

    return np.stack([channel(5), channel(3), channel(1)], axis=-1)
