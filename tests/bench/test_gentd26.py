"""The generated load has the statistics of the trace that it is made after."""

import gzip
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import Path

import pytest

from bench import gentd26

HOURS = 23 * 24


def generated(seed: int) -> list[gentd26.TraceCall]:
    """As much as the trace has."""
    return list(takewhile(lambda call: call.at_s < 3600 * HOURS, gentd26.generate(seed)))


def shares(values: Sequence[object]) -> dict[object, float]:
    return {value: count / len(values) for value, count in Counter(values).items()}


@pytest.fixture(scope="module")
def load() -> list[gentd26.TraceCall]:
    return generated(0)


def test_the_same_seed_generates_the_same_load(load: list[gentd26.TraceCall]) -> None:
    assert gentd26.take(gentd26.generate(0), 100, 50) == load[100:150]
    assert gentd26.take(gentd26.generate(1), 100, 50) != load[100:150]


def test_what_is_asked_for_is_distributed_as_in_the_trace(load: list[gentd26.TraceCall]) -> None:
    n = shares([call.n for call in load])
    assert (n[1], n[4], n[8], n[2]) == pytest.approx((0.578, 0.192, 0.148, 0.082), abs=0.02)
    assert statistics.mean(call.n for call in load) == pytest.approx(2.69, abs=0.1)
    steps = shares([call.num_inference_steps for call in load])
    assert (steps[30], steps[40]) == pytest.approx((0.907, 0.051), abs=0.015)
    kinds = shares([call.kind for call in load])
    assert (kinds["TXT_2_IMG"], kinds["IMG_2_IMG"]) == pytest.approx((0.911, 0.082), abs=0.01)
    again = sum(one.n == other.n for one, other in pairwise(load)) / len(load)
    assert again == pytest.approx(0.497, abs=0.02)


def test_arrivals_are_as_bursty_as_in_the_trace() -> None:
    peaks, variations, night = [], [], []
    for seed in range(3):
        counts = Counter(int(call.at_s // 3600) for call in generated(seed))
        hours = [counts[hour] for hour in range(HOURS)]
        mean = statistics.mean(hours)
        peaks.append(max(hours) / mean)
        variations.append(statistics.pstdev(hours) / mean)
        night.append(sum(hours[hour] for hour in range(HOURS) if hour % 24 >= 18 and hour % 24 < 22))
    # In the trace: 9.2, 1.70, and no call in those hours.
    assert 7 < statistics.median(peaks) < 13
    assert statistics.median(variations) == pytest.approx(1.6, abs=0.2)
    assert set(night) == {0}


def test_within_an_hour_arrivals_are_poisson(load: list[gentd26.TraceCall]) -> None:
    assert [call.at_s for call in load] == sorted(call.at_s for call in load)
    minutes = Counter(int(call.at_s // 60) for call in load)
    busy = [hour for hour in range(HOURS) if sum(minutes[60 * hour + minute] for minute in range(60)) >= 60]
    within = [[minutes[60 * hour + minute] for minute in range(60)] for hour in busy]
    dispersion = sum(map(statistics.variance, within)) / sum(map(statistics.mean, within))
    assert dispersion == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_a_trace_file_is_read_in_the_order_of_its_times(tmp_path: Path, name: str) -> None:
    text = "arrival_s,kind,status,n,steps,exec_s\n60,TXT_2_IMG,SUCCEED,4,30,20\n0.5,IMG_2_IMG,FAILED,1,40,9\n"
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    assert gentd26.read(path) == [
        gentd26.TraceCall(0.5, "IMG_2_IMG", 1, 40),
        gentd26.TraceCall(60.0, "TXT_2_IMG", 4, 30),
    ]


@pytest.mark.parametrize(
    "text", ["arrival_s,kind,n,steps\n1,TXT_2_IMG,4,30\n2,TXT_2_IMG,four,30\n", "arrival_s,n\n1,1\n2,4\n", "a\n\n1\n"]
)
def test_a_line_that_is_no_call_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"trace\.csv:[23] is no call.*arrival_s, kind, n and steps"):
        gentd26.read(path)
