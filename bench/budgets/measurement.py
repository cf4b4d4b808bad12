"""What every row has: a budget, a way to measure it, and figures from as much as was measured.

Role: the interface between `bench.overhead` and the modules beside this one.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from bench.report import Spread, spread


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


Percentiles = dict[str, float | None]  # of one round, as `bench.report.percentiles` gives them, in seconds


def spreads(rounds: Sequence[Percentiles]) -> dict[str, Spread]:
    """Each percentile over the rounds. In each of them something was measured, so none is missing."""
    return {name: spread([value for of in rounds if (value := of[name]) is not None]) for name in rounds[0]}


def median_row(
    name: str, budget: str, budget_s: float, measured: Mapping[str, Sequence[Percentiles]], digits: int
) -> Row | None:
    """The row of a measurement with several variants, each of whose medians must be below `budget_s`."""
    if not all(measured.values()):
        return None
    figures = {variant: spreads(rounds) for variant, rounds in measured.items()}
    texts = [
        f"{variant}: median {of['p50'].shown(digits, 1000)} ms, p99 {of['p99'].shown(2, 1000)} ms"
        for variant, of in figures.items()
    ]
    return Row(
        name=name,
        budget=budget,
        measured="; ".join(texts),
        met=all(of["p50"].median < budget_s for of in figures.values()),
        figures=figures,
    )
