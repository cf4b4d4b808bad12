"""How full steps are, from what real workers tell Prometheus."""

import pytest
from prometheus_client import generate_latest

from bench.occupancy import Occupancy, between, parse
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


def test_a_page_of_somebody_else_is_refused() -> None:
    with pytest.raises(BenchError, match="no worker's"):
        parse([generate_latest(new_registry()).decode()], 0.0)
