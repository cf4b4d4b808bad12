"""What the bench's commands have in common at their doors: text to values, or to a message that says what is right."""

from collections.abc import Callable
from typing import TypeVar

import typer

from bench.workload import Mix, Shape, parse_mix, parse_shapes

T = TypeVar("T")


def shapes(text: str) -> Mix[Shape]:
    """Of `--shapes`."""
    return _checked(parse_shapes, text)


def one_shape(text: str, option: str) -> Shape:
    """Where a single one is wanted."""
    found = shapes(text).values
    if len(found) != 1:
        raise typer.BadParameter(f"{option} takes one shape, such as 64x64/20, not {len(found)}")
    return found[0]


def numbers(text: str, kind: Callable[[str], T], option: str) -> Mix[T]:
    """`VALUE[=WEIGHT],…` of a kind of number."""
    return _checked(lambda given: parse_mix(given, kind, option), text)


def _checked(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
