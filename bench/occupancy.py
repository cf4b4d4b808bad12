"""How full a server's steps are, from what its workers tell Prometheus.

Role: two readings of the workers' metrics to figures of the time between them. It knows their names and nothing else of
a server.
"""

import asyncio
import time
from collections.abc import Sequence

import aiohttp
from msgspec import Struct

from bench.metrics_page import read_page, samples
from bench.stack import BenchError

_SUMS = (
    "stepweave_worker_step_rows_sum",
    "stepweave_worker_step_rows_count",
    "stepweave_worker_step_seconds_sum",
)
_BORN = "process_start_time_seconds"


class Reading(Struct, frozen=True):
    """What all workers together have counted so far."""

    at_s: float  # on the clock of `time.perf_counter`
    rows: float
    steps: float
    step_s: float  # in steps
    workers: int
    born_s: tuple[float, ...] = ()  # when each worker's process started, as its machine's clock says


class Occupancy(Struct, frozen=True):
    """Between two readings."""

    rows_a_step: float | None  # mean, over the forward passes of all workers; None: there were none
    busy: float  # share of the time that a worker was in a step


def parse(texts: Sequence[str], at_s: float) -> Reading:
    """The workers' metrics pages, as they were read. Raises `BenchError` if one is no worker's."""
    totals = dict.fromkeys(_SUMS, 0.0)
    born_s: list[float] = []
    for text in texts:
        found = samples(text)
        if not any(sample.name in _SUMS for sample in found):
            raise BenchError("that page of metrics is no worker's: it has no stepweave_worker_step_rows")
        for sample in found:
            if sample.name in totals:
                totals[sample.name] += sample.value
            elif sample.name == _BORN:
                born_s.append(sample.value)
    rows, steps, step_s = totals.values()
    return Reading(at_s, rows, steps, step_s, len(texts), tuple(born_s))


def between(before: Reading, after: Reading) -> Occupancy:
    """Raises `BenchError` if a worker was started again in between: what it had counted is gone."""
    steps = after.steps - before.steps
    if after.born_s != before.born_s or steps < 0:
        raise BenchError("a worker was started again during the run: its metrics do not tell how full its steps were")
    worker_s = (after.at_s - before.at_s) * after.workers
    return Occupancy(
        rows_a_step=(after.rows - before.rows) / steps if steps > 0 else None,
        busy=(after.step_s - before.step_s) / worker_s if worker_s > 0 else 0.0,
    )


async def read(urls: Sequence[str]) -> Reading | None:
    """Now. None if there are no pages to read. Raises `BenchError` if one can't be read."""
    if not urls:
        return None
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        texts = await asyncio.gather(*(read_page(session, url) for url in urls))
    return parse(texts, time.perf_counter())
