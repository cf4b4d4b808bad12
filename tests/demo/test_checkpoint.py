"""The demo checkpoint that is shipped: small, loadable, and its parameters mean what they say."""

from itertools import combinations

import numpy as np
import pytest
from diffusers import StableDiffusion3Pipeline

from bench.demo import draw, load_pipeline
from bench.matcher.measure import average, measure, noise_pictures
from bench.matcher.model import Matcher
from bench.matcher.prompts import PROMPTS
from bench.matcher.real import real_pictures
from services.demo import DEMO_CHECKPOINT

CAPTIONS = [prompt.caption for prompt in PROMPTS]
SEEDS = (1, 2)


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusion3Pipeline:
    return load_pipeline()


@pytest.fixture(scope="module")
def matcher() -> Matcher:
    return Matcher.load()


@pytest.fixture(scope="module")
def drawn(pipeline: StableDiffusion3Pipeline) -> np.ndarray:
    """All prompts with both seeds: (2, 64, 64, 64, 3)."""
    return np.stack([draw(pipeline, CAPTIONS, seed) for seed in SEEDS])


def difference(one: np.ndarray, other: np.ndarray) -> float:
    """The mean difference of two pictures, of 255."""
    return float(np.abs(one.astype(np.int16) - other).mean())


def test_it_is_small_enough_to_ship() -> None:
    assert sum(file.stat().st_size for file in DEMO_CHECKPOINT.rglob("*")) <= 16_000_000


def test_the_matcher_can_tell_real_pictures_and_not_noise(matcher: Matcher) -> None:
    ceiling = measure(matcher, real_pictures())
    assert ceiling["named, top 5"] >= 0.9
    assert ceiling["held-out, top 5"] >= 0.9
    floor = average([measure(matcher, pictures) for pictures in noise_pictures(rounds=4, seed=0)])
    assert (floor["named, top 5"] + floor["held-out, top 5"]) / 2 < 0.15


def test_it_draws_what_it_is_asked_for(matcher: Matcher, drawn: np.ndarray) -> None:
    found = average([measure(matcher, pictures) for pictures in drawn])
    assert found["named, top 5"] >= 0.8
    assert found["held-out, top 5"] >= 0.4
    # A blot of the right colour is no answer: plain discs reach 12.5 % here.
    assert found["held-out, thing and colour"] >= 0.4


def test_another_seed_gives_another_picture_of_the_same_thing(drawn: np.ndarray) -> None:
    apart = [difference(one, other) for one, other in zip(*drawn, strict=True)]
    assert min(apart) > 1
    across = [difference(drawn[0, one], drawn[0, other]) for one, other in combinations(range(0, 64, 4), 2)]
    assert np.mean(apart) < np.mean(across)


def test_20_steps_are_better_than_4_and_guidance_4_than_1(
    pipeline: StableDiffusion3Pipeline, matcher: Matcher, drawn: np.ndarray
) -> None:
    few_steps = draw(pipeline, CAPTIONS, SEEDS[0], steps=4)
    little_guidance = draw(pipeline, CAPTIONS, SEEDS[0], guidance_scale=1.0)

    def fit(pictures: np.ndarray) -> float:
        return float(np.diagonal(matcher.score(pictures, CAPTIONS)).mean())

    assert fit(drawn[0]) > fit(few_steps)
    assert fit(drawn[0]) > fit(little_guidance)


@pytest.mark.parametrize(
    ("width", "height"), [(48, 48), (96, 64), (64, 96), (96, 96), (128, 64), (64, 128), (128, 128)]
)
def test_every_size_that_it_was_trained_on_is_filled(
    pipeline: StableDiffusion3Pipeline, matcher: Matcher, width: int, height: int
) -> None:
    prompts = ["red apple", "frog", "sunflower", "house"]
    for prompt, picture in zip(prompts, draw(pipeline, prompts, seed=1, width=width, height=height), strict=True):
        drawn = (picture < 235).any(axis=-1)
        across, down = np.flatnonzero(drawn.any(axis=0)), np.flatnonzero(drawn.any(axis=1))
        side = min(width, height)
        assert max(np.ptp(across), np.ptp(down)) >= 0.7 * side, prompt
        # One thing in the middle of the canvas, and white around it.
        square = picture[(height - side) // 2 :, (width - side) // 2 :][:side, :side]
        scores = matcher.score(square[None], ["apple", "frog", "sunflower", "house"])
        assert prompts[int(scores.argmax())] == prompt


def test_the_text_length_does_not_change_what_is_drawn(pipeline: StableDiffusion3Pipeline, drawn: np.ndarray) -> None:
    """The diffusers call's own default is 256 tokens, the server's is 20."""
    long = draw(pipeline, CAPTIONS[:4], SEEDS[0], max_sequence_length=256)
    for one, other in zip(long, drawn[0, :4], strict=True):
        assert difference(one, other) < 6  # measured: 1.5 to 2.6
