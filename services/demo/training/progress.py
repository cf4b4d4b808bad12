"""How far a long piece of work is: a bar on a terminal, a plain line now and then elsewhere."""

import sys
import time
from collections.abc import Iterator, Mapping

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 30.0


def steps(name: str, done: int, total: int, figures: Mapping[str, float] | None = None) -> Iterator[int]:
    """Counts from ``done`` up to ``total``; ``figures`` is shown as it stands, so the caller keeps it up to date."""
    figures = {} if figures is None else figures
    if sys.stderr.isatty():
        yield from _bar(name, done, total, figures)
    else:
        yield from _lines(name, done, total, figures)


def update_means(figures: dict[str, float], kept: float = 0.98, **values: float) -> None:
    """Moves the running mean of each of ``values`` in ``figures``; ``kept`` is the share that stays of the old mean."""
    for name, value in values.items():
        figures[name] = kept * figures.get(name, value) + (1 - kept) * value


def _bar(name: str, done: int, total: int, figures: Mapping[str, float]) -> Iterator[int]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[figures]}")) as progress:
        task = progress.add_task(name, total=total, completed=done, figures="")
        for step in range(done, total):
            yield step
            progress.update(task, completed=step + 1, figures=_shown(figures))


def _lines(name: str, done: int, total: int, figures: Mapping[str, float]) -> Iterator[int]:
    started = last = time.monotonic()
    for step in range(done, total):
        yield step
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES or step + 1 == total:
            last = now
            rate = (step + 1 - done) / (now - started)
            left = (total - step - 1) / rate
            parts = [f"{name}: {step + 1}/{total}", f"{rate:.2f}/s", f"{left / 60:.0f} min left", _shown(figures)]
            sys.stderr.write(", ".join(filter(None, parts)) + "\n")


def _shown(figures: Mapping[str, float]) -> str:
    return " ".join(f"{name} {value:.4g}" for name, value in figures.items())
