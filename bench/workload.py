"""Workloads: which calls are made and when, drawn from a seed.

Role: pure functions from a seed and a description to a list of `Call`, the same list on every machine. It opens no
socket and reads no clock. The words for a description are those of the command line: `64x64/20=3,96x96/40=1`.
"""

import random
import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from msgspec import Struct

T = TypeVar("T")

# What the demo model draws; to other models they are prompts like any others.
PROMPTS = ("red apple", "cat face", "house", "sunflower", "rocket", "frog", "guitar", "castle", "umbrella", "pizza")


class Shape(Struct, frozen=True, order=True):
    """What decides the cost of a picture, beside guidance."""

    width: int  # pixels
    height: int  # pixels
    num_inference_steps: int

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}"

    def __str__(self) -> str:
        return f"{self.size}/{self.num_inference_steps}"


class Call(Struct, frozen=True):
    """One API call to make."""

    number: int  # its place in the workload, from 0
    at_s: float  # when, from the start of the load; 0 in a closed loop, where the call before decides
    shape: Shape
    guidance_scale: float
    n: int  # pictures
    seed: int
    prompt: str

    def body(self) -> dict[str, object]:
        """Of POST /v1/images/generations."""
        return {
            "prompt": self.prompt,
            "size": self.shape.size,
            "num_inference_steps": self.shape.num_inference_steps,
            "guidance_scale": self.guidance_scale,
            "n": self.n,
            "seed": self.seed,
        }


class Mix(Struct, Generic[T], frozen=True):
    """Values and how often each comes up."""

    values: tuple[T, ...]
    weights: tuple[float, ...]

    def draw(self, rng: random.Random) -> T:
        return rng.choices(self.values, self.weights)[0]


# vLLM-Omni's dataset C, on which mixed-resolution servers are compared, and the same at an eighth of the side, which
# is what the demo model can draw.
DATASET_C = "512x512/20=15,768x768/20=25,1024x1024/25=45,1536x1536/35=15"
DATASET_C_SMALL = "64x64/20=15,96x96/20=25,128x128/25=45,192x192/35=15"
NAMED_SHAPES = {"demo": "64x64/20", "dataset-c": DATASET_C, "dataset-c-small": DATASET_C_SMALL}

_SHAPE = re.compile(r"(\d+)x(\d+)/(\d+)")


def parse_mix(text: str, parse: Callable[[str], T], option: str) -> Mix[T]:
    """`VALUE[=WEIGHT],…` to a mix; weights are relative and 1 where none is given. Raises `ValueError`."""
    values, weights = [], []
    for part in text.split(","):
        value, _, weight = part.strip().partition("=")
        try:
            values.append(parse(value))
            weights.append(float(weight) if weight else 1.0)
        except ValueError as error:
            raise ValueError(f"{option}: {part.strip()!r} can't be read: {error}") from None
        if not 0 < weights[-1] < float("inf"):
            raise ValueError(f"{option}: the weight in {part.strip()!r} must be a number above 0")
    return Mix(tuple(values), tuple(weights))


def parse_shapes(text: str) -> Mix[Shape]:
    """`WIDTHxHEIGHT/STEPS[=WEIGHT],…`, or one of `NAMED_SHAPES`. Raises `ValueError`."""
    return parse_mix(NAMED_SHAPES.get(text, text), _shape, "--shapes")


def _shape(text: str) -> Shape:
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise ValueError(f"a shape is WIDTHxHEIGHT/STEPS, such as 64x64/20; or say one of {', '.join(NAMED_SHAPES)}")
    return Shape(*map(int, match.groups()))


class Mixes(Struct, frozen=True):
    """What is drawn anew for each call."""

    shapes: Mix[Shape]
    guidance_scale: Mix[float]
    n: Mix[int]


def draw_calls(seed: int, times: Sequence[float], mixes: Mixes) -> list[Call]:
    """A call at each of `times`. What is asked does not depend on when, so open and closed loop ask the same."""
    rng = random.Random(f"calls {seed}")
    calls = []
    for number, at_s in enumerate(times):
        shape, guidance_scale, n = mixes.shapes.draw(rng), mixes.guidance_scale.draw(rng), mixes.n.draw(rng)
        prompt = PROMPTS[number % len(PROMPTS)]
        calls.append(Call(number, at_s, shape, guidance_scale, n, call_seed(seed, number), prompt))
    return calls


def call_seed(seed: int, number: int) -> int:
    """Of the first picture of a call; its others count up from it, and no two calls draw the same picture."""
    return seed * 1_000_000 + number * 16


def poisson_times(seed: int, rate: float, count: int) -> list[float]:
    """Arrivals of a Poisson process of `rate` a second, from 0 on."""
    rng = random.Random(f"arrivals {seed}")
    return list(accumulate(rng.expovariate(rate) for _ in range(count)))


def at_rate(times: Sequence[float], rate: float) -> list[float]:
    """The same arrivals, begun at 0 and stretched or squeezed so that their mean rate is `rate` a second."""
    first, last = times[0], times[-1]
    if last <= first:
        return [0.0] * len(times)
    factor = (len(times) - 1) / rate / (last - first)
    return [(time - first) * factor for time in times]
