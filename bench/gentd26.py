"""Load as a public production trace has it: read from the trace, or generated with its statistics.

Role: pure functions. The trace is GenTD26, published by Alibaba: 26,798 calls for pictures over 23 days, with times
shifted and names replaced by its publisher. It has no sizes. The constants below were computed from it.

How the generator works. The rate of calls is piecewise constant over hours. An hour's rate is the product of the hour
of the day, a factor of the day and a factor of its own; within the hour arrivals are Poisson, as they nearly are in the
trace (minutes within its busy hours have a variance of 1.5 times their mean). In 17 % of calls the user of the call
before calls again, and then nine times out of ten asks for as many pictures as then.
"""

import csv
import gzip
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from msgspec import Struct

from bench.workload import Mix

CALLS_AN_HOUR = 48.46  # mean over all 553 hours, of which a third have none; the busiest has 9.2 times as many
# Share of the mean rate by hour of the (shifted) day.
HOUR_OF_DAY = (
    *(2.08, 2.51, 0.60, 0.93, 2.89, 3.03, 3.11, 3.47, 1.05, 1.03, 1.10, 0.61),
    *(0.32, 0.30, 0.24, 0.11, 0.04, 0.03, 0.00, 0.00, 0.00, 0.00, 0.03, 0.52),
)
DAY_SHAPE = 1.8  # of the gamma distribution, of mean 1, of a day's factor: days have from 66 to 2,676 calls
HOUR_SHAPE = 12.0  # the same of an hour's own factor
KINDS = Mix(("TXT_2_IMG", "IMG_2_IMG", "INPAINTING"), (0.911, 0.082, 0.007))
N = Mix((1, 4, 8, 2, 3, 5), (15_494, 5_132, 3_968, 2_191, 9, 4))
# Those that make up a tenth of a per cent or more; 30 is 90.7 % of all.
STEPS = Mix(
    (30, 40, 28, 50, 35, 25, 38, 20, 100, 33, 60, 44, 45),
    (24_305, 1_362, 194, 145, 131, 107, 100, 67, 47, 35, 34, 31, 27),
)
SAME_USER = 0.174  # the user is that of the call before
SAME_N = 0.909  # and asks for as many pictures again


class TraceCall(Struct, frozen=True):
    """What a trace says of a call."""

    at_s: float
    kind: str  # TXT_2_IMG, IMG_2_IMG or INPAINTING
    n: int
    num_inference_steps: int


def generate(seed: int) -> Iterator[TraceCall]:
    """Calls with the trace's statistics, for ever, in the trace's own time."""
    rng = random.Random(f"gentd26 {seed}")
    n = N.draw(rng)
    for at_s in _arrivals(rng):
        if rng.random() >= SAME_USER * SAME_N:
            n = N.draw(rng)
        yield TraceCall(at_s, KINDS.draw(rng), n, STEPS.draw(rng))


def _arrivals(rng: random.Random) -> Iterator[float]:
    hour = 0
    while True:
        if hour % 24 == 0:
            day = rng.gammavariate(DAY_SHAPE, 1 / DAY_SHAPE)
        factor = day * HOUR_OF_DAY[hour % 24] * rng.gammavariate(HOUR_SHAPE, 1 / HOUR_SHAPE)
        rate = CALLS_AN_HOUR * factor / 3600
        at_s = 3600.0 * hour
        while rate > 0 and (at_s := at_s + rng.expovariate(rate)) < 3600 * (hour + 1):
            yield at_s
        hour += 1


def read(path: Path) -> list[TraceCall]:
    """The calls of a trace file, by time: CSV, gzipped if its name ends in .gz, with the columns `arrival_s`, `kind`,
    `n` and `steps`. Raises `ValueError` with the line that can't be read."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    reader = csv.DictReader(text.splitlines())
    calls = []
    for row in reader:
        try:
            calls.append(TraceCall(float(row["arrival_s"]), row["kind"], int(row["n"]), int(row["steps"])))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}:{reader.line_num} is no call: {type(error).__name__} {error}; "
                "a trace has the columns arrival_s, kind, n and steps"
            ) from None
    return sorted(calls, key=lambda call: call.at_s)


def take(calls: Iterator[TraceCall], skip: int, count: int) -> list[TraceCall]:
    """`count` calls after the first `skip`."""
    return list(islice(calls, skip, skip + count))
