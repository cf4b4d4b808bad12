"""Figures from results: nothing is left out in silence, and no rate is flattered by how it is counted."""

import json
from pathlib import Path

import msgspec
import pytest

from bench.report import Window, percentiles, spread, summarize, write_json
from tests.bench.builders import call, result


def test_percentiles_are_by_nearest_rank() -> None:
    assert percentiles([float(value) for value in range(1, 101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentiles([3.0, 1.0]) == {"p50": 1.0, "p95": 3.0, "p99": 3.0}
    assert percentiles([]) == {"p50": None, "p95": None, "p99": None}


def test_a_call_that_failed_counts_as_one_that_took_for_ever() -> None:
    results = [result(number, 0.0, 1.0 + number) for number in range(94)]
    results += [result(number, 0.0, 0.001, "refused") for number in range(94, 100)]
    summary = summarize(results, Window(0, 100), closed=False, solo=lambda _: 1.0)
    assert summary.latency_s == {"p50": 50.0, "p95": None, "p99": None}
    assert summary.completed_latency_s == {"p50": 47.0, "p95": 90.0, "p99": 94.0}
    assert summary.over_solo == {"p50": 50.0, "p95": None, "p99": None}
    assert summary.within_3_solo == pytest.approx(0.03)
    assert summary.outcomes == {"completed": 94, "refused": 6}
    assert summary.calls == 100


def test_what_was_under_way_at_the_end_is_counted_as_an_outcome_alone() -> None:
    results = [result(0, 0.0, 1.0), result(1, 0.0, 2.0), result(2, 4.0, 4.0, "interrupted")]
    summary = summarize(results, Window(0, 3), closed=False)
    assert summary.outcomes == {"completed": 2, "interrupted": 1}
    assert summary.latency_s["p99"] == 2.0
    assert summary.images_s == pytest.approx(0.5)


def test_latency_counts_from_when_a_call_was_due() -> None:
    summary = summarize([result(0, due_s=1.0, done_s=4.0, sent_s=3.5)], Window(0, 1), closed=False)
    assert summary.latency_s["p50"] == 3.0
    assert summary.late_start_s == 2.5


def test_warm_up_calls_count_for_the_rate_alone_and_there_only_within_the_window() -> None:
    results = [result(0, 0.0, 100.0), result(1, 0.0, 50.0, "server_error", detail="500"), result(2, 0.0, 13.0)]
    results += [result(3, 10.0, 12.0), result(4, 14.0, 16.0), result(5, 15.0, 15.5)]
    summary = summarize(results, Window(3, 5), closed=False)
    assert (summary.calls, summary.outcomes, summary.errors) == (2, {"completed": 2}, {})
    assert summary.latency_s["p99"] == 2.0
    assert summary.images_s == pytest.approx(2 / 4)  # those that ended at 12 and 13, from 10 to 14


@pytest.mark.parametrize(
    ("every_s", "lasts_s"), [(1.0, 30.0), (2.0, 0.5), (0.25, 7.0)], ids=["many at a time", "idle", "busy"]
)
def test_an_open_loop_s_rate_is_what_comes_while_the_load_is_on(every_s: float, lasts_s: float) -> None:
    # As many calls come before as are under way at a time, so the server is as full as it ever is.
    before = round(lasts_s / every_s) + 1
    results = [
        result(number, number * every_s, number * every_s + lasts_s, denoise_s=lasts_s)
        for number in range(before + 100)
    ]
    summary = summarize(results, Window(before, before + 100), closed=False)
    assert summary.images_s == pytest.approx(1 / every_s, rel=0.02)
    assert summary.denoising == pytest.approx(lasts_s / every_s, rel=0.02)
    assert summary.offered_calls_s == pytest.approx(1 / every_s)
    assert not summary.filling


def test_an_overloaded_server_s_rate_is_its_own_not_that_of_its_queue_s_end() -> None:
    # One picture a second; ten calls a second are due.
    results = [result(number, number / 10, number + 1.0, denoise_s=1.0) for number in range(116)]
    summary = summarize(results, Window(16, 116), closed=False)
    assert summary.images_s == pytest.approx(1.0, rel=0.02)
    assert summary.denoising == pytest.approx(1.0, rel=0.02)
    assert summary.offered_calls_s == pytest.approx(10.0)


def test_a_server_that_was_still_filling_is_told_of() -> None:
    results = [result(number, float(number), number + 30.0) for number in range(50)]
    assert summarize(results, Window(10, 50), closed=False).filling
    assert not summarize(results, Window(31, 50), closed=False).filling
    assert not summarize(results, Window(10, 50), closed=True).filling


def test_what_a_closed_loop_can_t_tell_is_left_blank() -> None:
    summary = summarize([result(number, 0.0, 1.0 + number) for number in range(4)], Window(1, 4), closed=True)
    assert (summary.late_start_s, summary.offered_calls_s, summary.offered_images_s) == (None, None, None)


def test_the_pictures_due_count_those_that_never_came() -> None:
    results = [result(number, float(number), number + 0.1, "refused") for number in range(3)]
    results = [msgspec.structs.replace(one, call=call(one.call.number, n=4)) for one in results]
    summary = summarize(results, Window(0, 3), closed=False)
    assert (summary.offered_calls_s, summary.offered_images_s, summary.images_s) == (1.0, 4.0, 0.0)


def test_a_closed_loop_s_rate_is_that_of_whole_batches() -> None:
    # Eight clients whose calls end together every 4 seconds: 2 images a second, of which the first and the last eight
    # are not measured.
    results = [result(number, 4.0 * (number // 8), 4.0 * (number // 8 + 1)) for number in range(48)]
    summary = summarize(results, Window(8, 40), closed=True)
    assert summary.calls == 32
    assert summary.images_s == pytest.approx(2.0)


def test_a_closed_loop_s_rate_counts_pictures_and_only_those_that_came() -> None:
    results = [result(number, 0.0, 1.0 + number, pictures=4, denoise_s=2.0) for number in range(4)]
    results[2] = result(2, 0.0, 3.0, "timeout")
    summary = summarize(results, Window(1, 4), closed=True)
    assert summary.images_s == pytest.approx(8 / 3)
    assert summary.denoising == pytest.approx(4 / 3)


def test_without_results_there_are_no_figures() -> None:
    for closed in (True, False):
        summary = summarize([], Window(0, 10), closed, solo=lambda _: 1.0)
        assert (summary.calls, summary.images_s, summary.within_3_solo) == (0, None, None)
        assert summary.latency_s["p50"] is None


def test_a_spread_is_the_median_between_least_and_most() -> None:
    measured = spread([0.003, 0.001, 0.002])
    assert (measured.median, measured.least, measured.most) == (0.002, 0.001, 0.003)
    assert measured.shown(1, 1000) == "2.0 (1.0–3.0)"


def test_figures_are_written_as_json(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_json(path, [spread([1.0])])
    assert json.loads(path.read_text()) == [{"median": 1.0, "least": 1.0, "most": 1.0, "values": [1.0]}]
    write_json(None, [])
