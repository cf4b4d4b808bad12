"""How full steps are, from what real workers tell Prometheus."""

import re

import pytest
from prometheus_client import generate_latest

from bench.occupancy import Occupancy, Reading, between, parse
from bench.stack import BenchError
from common.messages import GroupTiming, StepResult
from common.metrics import new_registry
from services.worker.metrics import WorkerMetrics


class Worker:
    """The metrics of one."""

    def __init__(self) -> None:
        self._registry = new_registry()
        self._metrics = WorkerMetrics(self._registry, "demo")

    def step(self, rows: int, seconds: float) -> None:
        timing = GroupTiming(requests=rows, rows=rows, tokens=64 * rows, seconds=seconds)
        self._metrics.stepped(StepResult("worker", "boot", 1, timings=(timing,)))

    def page(self) -> str:
        return generate_latest(self._registry).decode()


def test_occupancy_is_of_the_time_between_two_readings_and_of_all_workers() -> None:
    one, other = Worker(), Worker()
    one.step(rows=2, seconds=7.0)
    before = parse([one.page(), other.page()], at_s=100.0)
    one.step(rows=8, seconds=2.0)
    one.step(rows=16, seconds=3.0)
    other.step(rows=6, seconds=1.0)
    after = parse([one.page(), other.page()], at_s=110.0)
    assert between(before, after) == Occupancy(rows_a_step=10.0, busy=pytest.approx(0.3))


def test_without_a_step_there_is_no_mean() -> None:
    page = Worker().page()
    assert between(parse([page], 0.0), parse([page], 1.0)) == Occupancy(rows_a_step=None, busy=0.0)


def test_a_worker_that_was_started_again_is_told_of() -> None:
    before = Reading(0.0, rows=10_000.0, steps=1_000.0, step_s=500.0, workers=1)
    with pytest.raises(BenchError, match="started again"):
        between(before, Reading(100.0, rows=800.0, steps=100.0, step_s=50.0, workers=1))


def test_a_restart_is_noticed_although_the_sums_have_grown() -> None:
    worker, other = Worker(), Worker()
    before = parse([worker.page(), other.page()], 0.0)
    other.step(rows=8, seconds=1.0)
    reborn = re.sub(r"(?m)^process_start_time_seconds .*$", "process_start_time_seconds 1.0", worker.page())
    with pytest.raises(BenchError, match="started again"):
        between(before, parse([reborn, other.page()], 10.0))


def test_a_page_of_somebody_else_is_refused() -> None:
    with pytest.raises(BenchError, match="no worker's"):
        parse([generate_latest(new_registry()).decode()], 0.0)
