"""What the bench's commands have in common at their doors: text to values, or to a message that says what is right."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

import typer

from bench.workload import Mix, Shape, parse_mix, parse_shapes

T = TypeVar("T")


def server_address(text: str) -> str:
    """`http://HOST[:PORT]`."""
    if not _is_web_address(text) or urlsplit(text).path.strip("/"):
        raise typer.BadParameter(f"{text!r} is no server's address, such as http://127.0.0.1:8000")
    return text.rstrip("/")


def page_addresses(texts: list[str] | None) -> list[str]:
    """`http://HOST[:PORT]/PATH`, any number of them."""
    for text in texts or []:
        if not _is_web_address(text):
            raise typer.BadParameter(f"{text!r} is no page's address, such as http://127.0.0.1:9102/metrics")
    return texts or []


def _is_web_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port, or an IPv6 address
        return False


def _writable(path: Path | None) -> Path | None:
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent} to write {path.name} to")
    return path


JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write the figures to this file too.", dir_okay=False, callback=_writable),
]


def positive(text: str) -> int:
    """A count. Raises `ValueError`."""
    if int(text) < 1:
        raise ValueError("it must be at least 1")
    return int(text)


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
