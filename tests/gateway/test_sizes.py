"""Sizes: what is legal, and which legal one is nearest."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import SizeRule
from services.gateway.sizes import nearest_size, parse_size, size_fault

RULE = SizeRule(multiple=8, min_side=16, max_side=192, max_pixels=128 * 128, pixels_per_token=8)


@st.composite
def rules(draw: st.DrawFn) -> SizeRule:
    """Rules that allow at least one size, small enough to try all of them."""
    multiple = draw(st.sampled_from([1, 7, 8, 16]))
    low = draw(st.integers(1, 4))
    high = draw(st.integers(low, 12))
    pixels = draw(st.integers((low * multiple) ** 2, (high * multiple) ** 2))
    return SizeRule(
        multiple=multiple,
        min_side=max(1, low * multiple - draw(st.integers(0, multiple - 1))),
        max_side=high * multiple + draw(st.integers(0, multiple - 1)),
        max_pixels=pixels,
        pixels_per_token=8,
    )


def distance(size: tuple[int, int], width: int, height: int) -> float:
    return math.log(size[0] / max(width, 1)) ** 2 + math.log(size[1] / max(height, 1)) ** 2


@given(rules(), st.integers(-5, 400), st.integers(-5, 400))
def test_the_nearest_size_is_legal_and_no_legal_one_is_nearer(rule: SizeRule, width: int, height: int) -> None:
    nearest = nearest_size(rule, width, height)
    assert size_fault(rule, *nearest) is None
    sides = range(rule.multiple, rule.max_side + 1, rule.multiple)
    legal = [size for size in itertools.product(sides, sides) if size_fault(rule, *size) is None]
    best = min(distance(size, width, height) for size in legal)
    assert distance(nearest, width, height) <= best + 1e-9


@given(rules(), st.integers(1, 12), st.integers(1, 12))
def test_a_legal_size_is_its_own_nearest(rule: SizeRule, columns: int, rows: int) -> None:
    width, height = columns * rule.multiple, rows * rule.multiple
    if size_fault(rule, width, height) is None:
        assert nearest_size(rule, width, height) == (width, height)


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ((100, 100), (104, 104)),
        ((1, 64), (16, 64)),
        ((0, 0), (16, 16)),
        ((-8, 64), (16, 64)),
        ((4000, 2000), (184, 88)),  # too many pixels: the aspect ratio stays
        ((10**18, 10**18), (128, 128)),
    ],
)
def test_nearest_sizes_that_people_would_expect(asked: tuple[int, int], nearest: tuple[int, int]) -> None:
    assert nearest_size(RULE, *asked) == nearest


def test_a_rule_without_any_size_is_an_error() -> None:
    rule = SizeRule(multiple=64, min_side=65, max_side=127, max_pixels=10**6, pixels_per_token=8)
    with pytest.raises(ValueError, match="no size satisfies"):
        nearest_size(rule, 100, 100)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64x128", (64, 128)),
        ("-64x0", (-64, 0)),
        ("64", None),
        ("64x", None),
        ("64x64x64", None),
        ("64X64", None),
        (" 64x64", None),
        ("64x64\n", None),
        ("٦٤x٦٤", None),
        ("1e2x64", None),
        ("9" * 30 + "x64", None),
    ],
)
def test_size_text(text: str, size: tuple[int, int] | None) -> None:
    assert parse_size(text) == size
