"""How often the matcher picks out a picture's own caption, and how often it does for pictures known to be right.

``python -m bench.matcher.measure`` measures the matcher itself: on real pictures, which no generator can be better
than, and on noise, which none should be worse than.
"""

from collections.abc import Sequence

import numpy as np
import typer

from bench.matcher.model import SIZE, Matcher, rank_of_own, split_caption
from bench.matcher.prompts import NAMED, PROMPTS
from bench.matcher.real import real_pictures
from services.demo.training.colours import COLOURS
from services.demo.training.pictures import CHOSEN, name_of

TOP = 5
SEED = 0
NOISE_ROUNDS = 20
NAMED_HALF = slice(0, len(NAMED))
HELD_OUT_HALF = slice(len(NAMED), None)


def measure(matcher: Matcher, pictures: np.ndarray) -> dict[str, float]:
    """Shares of ``pictures``, uint8 (64, H, W, 3) in the order of ``PROMPTS``, whose own caption ranks high.

    Among the captions of the second half, a blot of the right colour is often enough for a high rank. So for that half
    there are also: the right thing, whatever its colour, high among the 64 things; the right colour first among all
    colours; and the share of pictures that have both.
    """
    nouns = [split_caption(prompt.caption)[1] for prompt in PROMPTS]
    coloured = [f"{colour} {noun}" for noun in nouns for colour in COLOURS]
    # All captions at once, because the pictures cost far more than the captions.
    scores = matcher.score(pictures, [*(prompt.caption for prompt in PROMPTS), *nouns, *coloured])
    own, by_noun, by_colour = np.split(scores, [len(PROMPTS), 2 * len(PROMPTS)], axis=1)
    ranks = rank_of_own(own)
    right_thing = rank_of_own(by_noun)[HELD_OUT_HALF] <= TOP
    best_colour = np.diagonal(by_colour.reshape(len(PROMPTS), len(PROMPTS), -1)).argmax(axis=0)
    wanted_colour = [prompt.colour for prompt in PROMPTS[HELD_OUT_HALF]]
    right_colour = np.array(list(COLOURS))[best_colour[HELD_OUT_HALF]] == wanted_colour
    return {
        f"named, top {TOP}": float((ranks[NAMED_HALF] <= TOP).mean()),
        "named, top 1": float((ranks[NAMED_HALF] == 1).mean()),
        f"held-out, top {TOP}": float((ranks[HELD_OUT_HALF] <= TOP).mean()),
        "held-out, top 1": float((ranks[HELD_OUT_HALF] == 1).mean()),
        f"held-out, thing in top {TOP}": float(right_thing.mean()),
        "held-out, colour first": float(right_colour.mean()),
        "held-out, thing and colour": float((right_thing & right_colour).mean()),
    }


def measure_strictly(matcher: Matcher, pictures: np.ndarray) -> dict[str, float]:
    """As ``measure``, but against the names of all things, put after the same colour word where there is one."""
    names = sorted(name_of(label) for label in CHOSEN)
    nouns = list(dict.fromkeys(split_caption(name)[1] for name in names))
    high = []
    for picture, prompt in zip(pictures, PROMPTS, strict=True):
        others = [f"{prompt.colour} {noun}" for noun in nouns] if prompt.colour else names
        scores = matcher.score(picture[None], [prompt.caption, *others])
        high.append(rank_of_own(scores)[0] <= TOP)
    return {
        f"named, top {TOP} of all": float(np.mean(high[NAMED_HALF])),
        f"held-out, top {TOP} of all": float(np.mean(high[HELD_OUT_HALF])),
    }


def average(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each figure."""
    return {name: float(np.mean([figures[name] for figures in measured])) for name in measured[0]}


def noise_pictures(rounds: int, seed: int) -> np.ndarray:
    """Noise in place of pictures: uint8 (rounds, 64, SIZE, SIZE, 3)."""
    random = np.random.default_rng(seed)
    return random.integers(256, size=(rounds, len(PROMPTS), SIZE, SIZE, 3), dtype=np.uint8)


def main() -> None:
    """Show the ceiling and the floor of the figures that the matcher gives."""
    matcher, real = Matcher.load(), real_pictures()
    for name, share in (measure(matcher, real) | measure_strictly(matcher, real)).items():
        typer.echo(f"real pictures: {name}: {share:.1%}")
    noise = average([measure(matcher, pictures) for pictures in noise_pictures(NOISE_ROUNDS, SEED)])
    for name, share in noise.items():
        typer.echo(f"noise: {name}: {share:.1%}")


if __name__ == "__main__":
    typer.run(main)
