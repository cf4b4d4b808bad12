"""From results to figures: rates, percentiles, spreads; and how they are shown and written.

Role: pure functions, but for those that print and write. Nothing is left out of a percentile in silence: a call that
did not bring its pictures counts as one that took for ever. Only what was under way when somebody ended the run says
nothing of the server; it is counted among the outcomes and nowhere else.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from bench.client import Result

PERCENTILES = (50, 95, 99)
WITHIN = 3.0  # times its solo latency: what a user still takes for the same service

Solo = Callable[[Result], float | None]  # the latency of that call on an idle server


class Summary(Struct, frozen=True, kw_only=True):
    """What a load met. Seconds; None where the figure does not exist."""

    calls: int
    offered_calls_s: float | None  # calls due a second in an open loop
    offered_images_s: float | None  # the same of pictures
    outcomes: dict[str, int]
    errors: dict[str, int]  # details of what failed
    images_s: float | None  # completed pictures a second, of all calls that ended while the measured ones fell due
    latency_s: dict[str, float | None]  # percentiles over all calls; None: more calls failed than that
    completed_latency_s: dict[str, float | None]  # over the completed alone
    over_solo: dict[str, float | None] | None  # percentiles of latency over solo latency; None: not measured
    within_3_solo: float | None  # share of all calls
    denoising: float | None  # pictures being denoised at a time, as their timings tell
    # 99 % of calls left this client no later than this: a check on the client itself. None in a closed loop, where a
    # call is due when it is made.
    late_start_s: float | None
    filling: bool  # an open loop whose first call had not ended when the first measured one fell due: see `images_s`


class Window(Struct, frozen=True):
    """Which calls are measured: those numbered from `first` on, before `end`."""

    first: int
    end: int


def summarize(results: Sequence[Result], window: Window, closed: bool, solo: Solo | None = None) -> Summary:
    """Figures of the calls in `window`. Other calls are load, and pictures of the time in which `window` is."""
    in_window = [result for result in results if window.first <= result.call.number < window.end]
    measured = [result for result in in_window if result.outcome != "interrupted"]
    completed = [result for result in measured if result.outcome == "completed"]
    ratios = _ratios(measured, solo) if solo is not None else None
    span = _closed_span(results, window) if closed else _open_span(in_window)
    in_span = [result for result in results if span is not None and span[0] < result.done_s <= span[1]]
    due = [] if closed else [result for result in in_window if span is not None and span[0] < result.due_s]
    seconds = span[1] - span[0] if span is not None else 0.0
    return Summary(
        calls=len(in_window),
        offered_calls_s=len(due) / seconds if due else None,
        offered_images_s=sum(result.call.n for result in due) / seconds if due else None,
        outcomes=dict(Counter(result.outcome for result in in_window)),
        errors=dict(Counter(f"{result.outcome}: {result.detail}" for result in measured if result.detail)),
        images_s=sum(result.pictures for result in in_span) / seconds if seconds > 0 else None,
        latency_s=percentiles([_latency_or_never(result) for result in measured]),
        completed_latency_s=percentiles([result.latency_s for result in completed]),
        over_solo=percentiles(ratios) if ratios is not None else None,
        within_3_solo=sum(ratio <= WITHIN for ratio in ratios) / len(ratios) if ratios else None,
        denoising=sum(result.denoise_s for result in in_span) / seconds if seconds > 0 else None,
        late_start_s=None if closed else percentiles([result.sent_s - result.due_s for result in measured])["p99"],
        filling=not closed and span is not None and min(result.done_s for result in results) > span[0],
    )


def _latency_or_never(result: Result) -> float:
    return result.latency_s if result.outcome == "completed" else math.inf


def _ratios(measured: Sequence[Result], solo: Solo) -> list[float]:
    """Of each call that has a solo latency; one that failed took for ever."""
    pairs = [(_latency_or_never(result), solo(result)) for result in measured]
    return [latency / alone for latency, alone in pairs if alone]


def _open_span(in_window: Sequence[Result]) -> tuple[float, float] | None:
    """From when the first measured call was due until the last one was: after that the server is no longer asked as
    much. None if there is no time between them."""
    due_s = [result.due_s for result in in_window]
    return (min(due_s), max(due_s)) if due_s and max(due_s) > min(due_s) else None


def _closed_span(results: Sequence[Result], window: Window) -> tuple[float, float] | None:
    """From the end before the first that counts until the last: as many ends as calls are measured.

    All clients were at work throughout, as long as the workload has as many calls after the window as there are
    clients. The first end itself opens the span and is not in it, or the rate would be too high.
    """
    ends = sorted(result.done_s for result in results if result.outcome != "interrupted")
    ends = ends[: window.end]
    if window.first >= len(ends):
        return None
    begun = ends[window.first - 1] if window.first else 0.0
    return (begun, ends[-1]) if ends[-1] > begun else None


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """By nearest rank: the least value that at least so many per cent of `values` do not exceed; None if that is never
    reached, or if there are no values."""
    ordered = sorted(values)
    found: dict[str, float | None] = {}
    for percent in PERCENTILES:
        value = ordered[math.ceil(percent / 100 * len(ordered)) - 1] if ordered else math.inf
        found[f"p{percent}"] = value if math.isfinite(value) else None
    return found


class Spread(Struct, frozen=True):
    """A figure measured several times."""

    median: float
    least: float
    most: float
    values: tuple[float, ...]

    def shown(self, digits: int = 2, factor: float = 1.0) -> str:
        middle, least, most = (factor * value for value in (self.median, self.least, self.most))
        return f"{middle:.{digits}f} ({least:.{digits}f}–{most:.{digits}f})"


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    return Spread(statistics.median(values), min(values), max(values), tuple(values))


def shown(value: float | None, unit: str = "", digits: int = 2) -> str:
    """A figure for a table; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def summary_table(summaries: Mapping[str, Summary], title: str) -> Table:
    """A column for each summary."""
    table = Table("", *summaries, title=title)

    def row(name: str, cell: Callable[[Summary], str]) -> None:
        table.add_row(name, *(cell(summary) for summary in summaries.values()))

    row("calls", lambda s: str(s.calls))
    if any(summary.offered_calls_s is not None for summary in summaries.values()):
        row("due", lambda s: f"{shown(s.offered_calls_s)} calls/s, {shown(s.offered_images_s)} images/s")
    row("outcomes", lambda s: ", ".join(f"{name} {count}" for name, count in sorted(s.outcomes.items())))
    row("images/s", lambda s: shown(s.images_s))
    row("latency p50/p95/p99", lambda s: _triple(s.latency_s, " s"))
    row("… of the completed", lambda s: _triple(s.completed_latency_s, " s"))
    row("… over solo latency", lambda s: "–" if s.over_solo is None else _triple(s.over_solo, "×"))
    row(f"within {WITHIN:g}× solo", lambda s: "–" if s.within_3_solo is None else f"{s.within_3_solo:.1%}")
    row("pictures being denoised", lambda s: shown(s.denoising, digits=1))
    row("client's own delay, p99", lambda s: shown(s.late_start_s, " s", digits=4))
    return table


def _triple(figures: Mapping[str, float | None], unit: str) -> str:
    return " / ".join(shown(value, unit) for value in figures.values())


def write_json(path: Path | None, figures: Any) -> None:
    """Writes the figures, if there is a file to write them to."""
    if path is not None:
        path.write_text(json.dumps(msgspec.to_builtins(figures), indent=2) + "\n")


def show(table: Table) -> None:
    Console().print(table)
