"""Typed values out of a JSON object, each with a clear 400 where it is not what it should be.

Role: one reader for each kind of value. `null` means absent. It knows no field by name: `schema` does.

Numbers: an integer may be written 20 or 20.0; true, "20" and 20.5 are none. Text must be valid Unicode, which JSON's
lone surrogate escapes are not: they can't be written as UTF-8, so nothing behind the gateway could carry them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.errors import invalid

Body = Mapping[str, Any]

_SHOWN_CHARS = 64


def shown(value: object) -> str:
    """`value` as it may stand in a message: short, quoted, never a whole prompt."""
    if isinstance(value, dict | list):  # writing one that is nested deeply would exhaust the stack
        return _kind(value)
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def text(body: Body, name: str, max_chars: int) -> str | None:
    """The string under `name`."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise invalid(name, f"{name} must be a string, not {_kind(value)}")
    if len(value) > max_chars:
        raise invalid(name, f"{name} has {len(value):,} characters; {max_chars:,} is the most")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(name, f"{name} is not valid Unicode text: it holds half of a surrogate pair") from None
    return value


def integer(body: Body, name: str, low: int, high: int) -> int | None:
    """The integer under `name`, from `low` to `high`."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(name, f"{name} must be an integer, not {_kind(value)}")
    if not low <= value <= high:
        raise invalid(name, f"{name} must be from {low} to {high}, not {_number(value)}")
    return value


def number(body: Body, name: str, low: float, high: float) -> float | None:
    """The finite number under `name`, from `low` to `high`."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(name, f"{name} must be a number, not {_kind(value)}")
    if not low <= value <= high:  # false for NaN too; integers too large for a float compare as they are
        raise invalid(name, f"{name} must be a finite number from {low:g} to {high:g}, not {_number(value)}")
    return float(value)


def boolean(body: Body, name: str) -> bool | None:
    """The boolean under `name`."""
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise invalid(name, f"{name} must be true or false, not {_kind(value)}")


def choice(body: Body, name: str, known: Sequence[str]) -> str | None:
    """The string under `name`, one of `known`."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or value not in known:
        listed = ", ".join(known[:-1]) + f" or {known[-1]}"
        raise invalid(name, f"{name} must be {listed}, not {shown(value)}")
    return value


def _kind(value: object) -> str:
    """What JSON calls it, with the value where that helps."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the string {shown(value)}"
    if isinstance(value, int | float):
        return _number(value)
    return shown(value)


def _number(value: int | float) -> str:
    # Python refuses to write integers of more than some thousand digits.
    return str(value) if isinstance(value, float) or value.bit_length() < 256 else "a number of too many digits"
