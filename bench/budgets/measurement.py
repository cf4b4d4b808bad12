"""What every row has: a budget, a way to measure it, and figures from as much as was measured.

Role: the interface between `bench.overhead` and the modules beside this one.
"""

from typing import Any, Protocol

from msgspec import Struct


class Row(Struct, frozen=True, kw_only=True):
    """One row of the report."""

    name: str
    budget: str
    measured: str  # for people
    met: bool | None  # None: the budget has no figure to hold this to, or this one does not tell
    figures: dict[str, Any]


class Measurement(Protocol):
    """One row to be. `run` may be cancelled; `row` then tells of what was measured until then."""

    name: str
    budget: str

    async def run(self) -> None:
        """Raises `BenchError` where it can't be measured."""
        ...

    def row(self) -> Row | None:
        """None: nothing was measured."""
        ...
