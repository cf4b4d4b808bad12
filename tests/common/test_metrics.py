"""The port that metrics are read at, and metrics that are read when they are asked for."""

import asyncio
import socket
import threading
import urllib.error
from collections.abc import Iterator

import pytest
from prometheus_client import Counter

from common import metrics
from common.config import GatewayConfig, SchedulerConfig, WorkerConfig
from common.errors import ConfigError
from common.metrics import Family, OnScrape, Reading, exposed, new_registry
from services.gateway.app import serve_gateway
from services.scheduler.service import serve_scheduler
from tests.common.scraping import DEADLINE_S, of, scrape

HOST = "127.0.0.1"
FAMILIES = (
    Family("gauge", "stepweave_test_things", "Things.", ("kind",)),
    Family("counter", "stepweave_test_total", "T."),
)


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


async def test_a_registry_is_answered_over_http_and_no_longer_than_asked() -> None:
    port, registry, before = free_port(), new_registry(), set(threading.enumerate())
    Counter("stepweave_test_events", "Events.", registry=registry).inc(3)
    async with exposed(registry, HOST, port):
        scraped = await asyncio.to_thread(scrape, port)
        assert scraped.total("stepweave_test_events_total") == 3
        assert scraped.total("process_resident_memory_bytes") > 0
        assert not any(name.endswith("_created") for name in scraped.names())
    with socket.create_server((HOST, port)):  # it is free again
        pass
    async with asyncio.timeout(DEADLINE_S):  # a daemon that is left would have the process end abruptly
        while any(thread.daemon for thread in set(threading.enumerate()) - before):
            await asyncio.sleep(0.005)


async def test_with_port_0_nothing_is_opened() -> None:
    before = threading.active_count()
    async with exposed(new_registry(), HOST, 0):
        assert threading.active_count() == before


async def test_a_port_that_is_taken_stops_the_start() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        local = "tcp://127.0.0.1:*"
        said = rf"127\.0\.0\.1:{port} for metrics: .*--metrics-port"
        with pytest.raises(ConfigError, match=said):
            await asyncio.wait_for(serve_scheduler(SchedulerConfig(bind=local, metrics_port=port)), DEADLINE_S)
        gateway = GatewayConfig(data_bind=local, port=free_port(), metrics_port=port)
        with pytest.raises(ConfigError, match=said):
            await asyncio.wait_for(serve_gateway(gateway), DEADLINE_S)


def test_the_three_services_have_the_settings() -> None:
    for config in (GatewayConfig(), SchedulerConfig(), WorkerConfig(model="demo")):
        assert (config.metrics_host, config.metrics_port) == (HOST, 0)


async def test_what_merely_is_is_read_on_the_loop_that_owns_it() -> None:
    threads: list[threading.Thread] = []

    def read() -> Iterator[Reading]:
        threads.append(threading.current_thread())
        yield Reading("stepweave_test_things", 2, ("red",))
        yield Reading("stepweave_test_things", 5, ("blue",))
        yield Reading("stepweave_test_total", 7)

    port, registry = free_port(), new_registry()
    registry.register(OnScrape(FAMILIES, read, asyncio.get_running_loop()))
    async with exposed(registry, HOST, port):
        scraped = await asyncio.to_thread(scrape, port)
    assert scraped.total("stepweave_test_things", kind="red") == 2
    assert scraped.total("stepweave_test_things", kind="blue") == 5
    assert scraped.total("stepweave_test_total") == 7
    assert threads == [threading.current_thread()]


async def test_a_loop_that_does_not_answer_fails_the_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "ANSWER_S", 0.1)
    port, registry = free_port(), new_registry()
    registry.register(OnScrape(FAMILIES, list, asyncio.get_running_loop()))
    async with exposed(registry, HOST, port):
        with pytest.raises(urllib.error.HTTPError, match="500"):
            scrape(port)  # here, so that the loop waits for its own answer
        await asyncio.to_thread(scrape, port)  # and then it answers again


def test_a_name_that_is_in_no_family_is_a_fault() -> None:
    registry = new_registry()
    registry.register(OnScrape(FAMILIES, lambda: [Reading("stepweave_test_other", 1)]))
    with pytest.raises(KeyError, match="stepweave_test_other"):
        of(registry)
