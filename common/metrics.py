"""Metrics: one Prometheus registry a process, and the port that it is read at.

Role: what the services' own `metrics` modules share. Beside those it is the only module that knows prometheus_client.
What changes often is counted as it happens; what merely is (how many wait, how many run) is read when Prometheus asks,
on the event loop that owns it, and so costs nothing in between.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Literal, NamedTuple

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import CollectorRegistry

from common.errors import ConfigError

ANSWER_S = 5.0  # an event loop that does not answer within this fails the scrape, which is what an operator should see

# Upper bounds of the histograms' buckets.
STEP_S = (
    0.002,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)  # a denoise step
GAP_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0, 60.0)  # between two steps; 0.3 ms is the aim
STAGE_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # encoding, decoding, writing a file
PICTURE_S = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0, 600.0)
ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)  # of one forward


class Family(NamedTuple):
    """A metric that is read when it is asked for."""

    kind: Literal["counter", "gauge"]
    name: str  # as it is read: a counter's ends in _total
    help: str
    labels: tuple[str, ...] = ()

    def empty(self) -> CounterMetricFamily | GaugeMetricFamily:
        """Without samples."""
        if self.kind == "counter":
            return CounterMetricFamily(self.name, self.help, labels=self.labels)
        return GaugeMetricFamily(self.name, self.help, labels=self.labels)


class Reading(NamedTuple):
    """One sample of a family."""

    name: str  # of the family
    value: float
    labels: tuple[str, ...] = ()


class OnScrape:
    """A collector that reads `families` by `read`: in `loop`, where there is one, else where it is asked."""

    def __init__(
        self,
        families: Sequence[Family],
        read: Callable[[], Iterable[Reading]],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._families = families
        self._read = read
        self._loop = loop

    def describe(self) -> list[CounterMetricFamily | GaugeMetricFamily]:
        """All families, without asking anybody."""
        return [family.empty() for family in self._families]

    def collect(self) -> list[CounterMetricFamily | GaugeMetricFamily]:
        """All families with what they are now. With a loop, call it on another thread."""
        found = {family.name: family.empty() for family in self._families}
        for reading in self._readings():
            found[reading.name].add_metric(reading.labels, reading.value)
        return list(found.values())

    def _readings(self) -> list[Reading]:
        if self._loop is None:
            return list(self._read())

        async def read() -> list[Reading]:
            return list(self._read())

        return asyncio.run_coroutine_threadsafe(read(), self._loop).result(ANSWER_S)


def new_registry() -> CollectorRegistry:
    """An own one, not the library's global, so that a process may hold several services; with the process's memory,
    CPU seconds and open files in it."""
    # Else each counter has a second series that says when it began.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    return registry


@asynccontextmanager
async def exposed(registry: CollectorRegistry, host: str, port: int) -> AsyncIterator[None]:
    """Answers http://host:port/metrics while the context lasts; with port 0 nothing is opened.

    Raises `ConfigError` if the port can't be listened on.
    """
    if port == 0:
        yield
        return
    try:
        server, thread = prometheus_client.start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"can't listen on {host}:{port} for metrics: {error.strerror or error}; "
            "choose others with --metrics-host and --metrics-port"
        ) from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    try:
        yield
    finally:
        await asyncio.to_thread(stop)  # its thread looks twice a second whether it is to end
