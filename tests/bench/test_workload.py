"""Workloads are what they say, and the same for the same seed."""

import statistics
from collections import Counter
from itertools import pairwise

import pytest

from bench.workload import (
    DATASET_C,
    NAMED_SHAPES,
    Mix,
    Mixes,
    Shape,
    at_rate,
    draw_calls,
    parse_mix,
    parse_shapes,
    poisson_times,
)

MIXES = Mixes(parse_shapes("dataset-c"), parse_mix("4=3,1", float, "--guidance"), parse_mix("1=58,4=19", int, "-n"))


def test_the_same_seed_draws_the_same_calls_and_another_one_others() -> None:
    times = poisson_times(7, 2.0, 50)
    assert times == poisson_times(7, 2.0, 50)
    assert draw_calls(7, times, MIXES) == draw_calls(7, times, MIXES)
    assert poisson_times(8, 2.0, 50) != times
    assert [c.shape for c in draw_calls(8, times, MIXES)] != [c.shape for c in draw_calls(7, times, MIXES)]


def test_what_is_asked_does_not_depend_on_when() -> None:
    early, late = draw_calls(1, [0.0] * 20, MIXES), draw_calls(1, poisson_times(3, 1.0, 20), MIXES)
    assert [call.body() for call in early] == [call.body() for call in late]


def test_no_two_pictures_of_a_workload_are_the_same() -> None:
    calls = draw_calls(3, [0.0] * 500, Mixes(MIXES.shapes, MIXES.guidance_scale, Mix((10,), (1,))))
    seeds = [call.seed + index for call in calls for index in range(call.n)]
    assert len(set(seeds)) == len(seeds)


def test_arrivals_are_poisson() -> None:
    times = poisson_times(0, 5.0, 20_000)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)  # of an exponential it is the mean
    counts = Counter(int(time) for time in times)
    seconds = [counts[second] for second in range(int(times[-1]))]
    assert statistics.variance(seconds) / statistics.mean(seconds) == pytest.approx(1.0, abs=0.1)


def test_each_value_comes_as_often_as_its_weight_says() -> None:
    calls = draw_calls(0, [0.0] * 20_000, MIXES)
    shares = {shape: count / len(calls) for shape, count in Counter(str(call.shape) for call in calls).items()}
    assert shares == {
        "512x512/20": pytest.approx(0.15, abs=0.01),
        "768x768/20": pytest.approx(0.25, abs=0.01),
        "1024x1024/25": pytest.approx(0.45, abs=0.01),
        "1536x1536/35": pytest.approx(0.15, abs=0.01),
    }
    assert sum(call.guidance_scale == 4 for call in calls) / len(calls) == pytest.approx(0.75, abs=0.01)
    assert sum(call.n == 1 for call in calls) / len(calls) == pytest.approx(58 / 77, abs=0.01)


def test_a_call_is_a_body_of_the_images_api() -> None:
    (call,) = draw_calls(2, [0.5], Mixes(parse_shapes("96x64/12"), Mix((1.5,), (1,)), Mix((3,), (1,))))
    assert call.at_s == 0.5
    assert call.body() | {"prompt": ""} == {
        "prompt": "",
        "size": "96x64",
        "num_inference_steps": 12,
        "guidance_scale": 1.5,
        "n": 3,
        "seed": 2_000_000,
    }


def test_shapes_are_read_by_name_or_one_by_one() -> None:
    assert parse_shapes("64x96/20") == Mix((Shape(64, 96, 20),), (1.0,))
    assert parse_shapes("dataset-c") == parse_shapes(DATASET_C)
    small, large = parse_shapes("dataset-c-small"), parse_shapes("dataset-c")
    assert small.weights == large.weights
    for a, b in zip(small.values, large.values, strict=True):
        assert (8 * a.width, 8 * a.height, a.num_inference_steps) == (b.width, b.height, b.num_inference_steps)
    assert all(parse_shapes(name).values for name in NAMED_SHAPES)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("64x64", "64x64/20"),
        ("64x64/20=0", "above 0"),
        ("64x64/20=inf", "above 0"),
        ("64x64/20=nan", "above 0"),
        ("64x64/20=often", "often"),
        ("dataset-d", "dataset-c"),
        ("", "64x64/20"),
    ],
)
def test_shapes_that_are_none_are_refused_with_what_would_be_right(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"--shapes.*{words}"):
        parse_shapes(text)


def test_arrivals_are_stretched_to_a_rate_and_keep_their_shape() -> None:
    times = at_rate([10.0, 20.0, 50.0], 0.5)
    assert times == [0.0, 1.0, 4.0]
    assert at_rate([3.0], 2.0) == [0.0]
    assert at_rate([3.0, 3.0], 2.0) == [0.0, 0.0]
