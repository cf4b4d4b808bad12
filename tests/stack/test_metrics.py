"""A real stack is asked for pictures, and its three processes tell the same of it."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from tests.common.scraping import Scraped, scrape
from tests.stack.processes import DEADLINE_S, Stack, free_port, serving, wait_until

STEPS = 10
BODY = {"prompt": "red apple", "size": "64x64", "num_inference_steps": STEPS, "guidance_scale": 4.0}


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


async def ask(stack: Stack, bodies: list[dict[str, Any]]) -> list[int]:
    """The status of each, all posted at once."""

    async def post(session: aiohttp.ClientSession, body: dict[str, Any]) -> int:
        async with session.post("/v1/images/generations", json=body) as response:
            return response.status

    async with aiohttp.ClientSession(stack.url, timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
        return list(await asyncio.gather(*(post(session, body) for body in bodies)))


def scrape_until(port: int, condition: Callable[[Scraped], bool], what: str) -> Scraped:
    found: list[Scraped] = []

    def holds() -> bool:
        found.append(scrape(port))
        return condition(found[-1])

    wait_until(holds, what)
    return found[-1]


async def test_the_sums_of_all_processes_agree_with_what_was_asked(tmp_path: Path) -> None:
    first = free_ports(3)
    with serving(tmp_path, "--metrics-port", str(first)) as stack:
        before = [scrape(port).counted() for port in range(first, first + 3)]
        begun = time.monotonic()
        bodies = [
            BODY | {"n": 3, "seed": 1},
            BODY | {"seed": 7},
            BODY | {"guidance_scale": 1.0},
            BODY | {"size": "1x1"},
        ]
        assert await ask(stack, bodies) == [200, 200, 200, 400]
        pictures, rows = 5, (4 * 2 + 1) * STEPS
        # The scheduler hears last: once a gateway's acknowledgement has come back to the worker.
        done = "stepweave_scheduler_requests_total"
        scheduler = scrape_until(first + 1, lambda each: each.total(done) == pictures, "the scheduler has heard")
        elapsed_s = time.monotonic() - begun
        gateway, worker = scrape(first), scrape(first + 2)

    for earlier, later in zip(before, (gateway, scheduler, worker), strict=True):
        new = {each for each in later.counted() - earlier if "/health/" not in str(each)}
        assert not new, "a rate misses the event with which a series begins"

    assert gateway.total("stepweave_gateway_requests_total", model="demo", outcome="completed") == pictures
    assert gateway.total("stepweave_gateway_request_seconds_count") == pictures
    assert gateway.total("stepweave_gateway_replies_total", status="200", route="/v1/images/generations") == 3
    assert gateway.total("stepweave_gateway_replies_total", status="400") == 1
    assert gateway.total("stepweave_gateway_pending_requests", model="demo") == 0
    assert gateway.total("stepweave_gateway_scheduler_heard") == 1

    assert scheduler.total("stepweave_scheduler_requests_total", outcome="completed") == pictures
    assert scheduler.total("stepweave_scheduler_live_requests", model="demo") == 0
    assert scheduler.total("stepweave_scheduler_workers", model="demo", state="serving") == 1
    assert scheduler.total("stepweave_scheduler_gateways") == 1
    assert scheduler.total("stepweave_scheduler_plan_lag_seconds_count") > 0
    assert scheduler.total("stepweave_scheduler_plan_lag_seconds_sum") < elapsed_s

    assert worker.total("stepweave_worker_requests_total", model="demo", outcome="completed") == pictures
    assert worker.total("stepweave_worker_images_acknowledged_total") == pictures
    for stage in ("encode", "denoise", "decode", "image"):
        assert worker.total(f"stepweave_worker_{stage}_seconds_count", model="demo") == pictures, stage
    assert worker.total("stepweave_worker_step_rows_sum") == rows
    assert STEPS <= worker.total("stepweave_worker_step_seconds_count") <= pictures * STEPS
    assert 0 < worker.total("stepweave_worker_step_seconds_sum") < elapsed_s
    assert worker.total("stepweave_worker_residents") == 0

    for each, process in ((gateway, "gateway"), (scheduler, "scheduler"), (worker, "worker")):
        assert each.total(f"stepweave_{process}_malformed_frames_total") == 0
        assert each.total("process_resident_memory_bytes") > 0

    lines = stack.log_lines()
    (who,) = worker.labels("stepweave_worker_info")
    completed = [line for line in lines if line["event"] == "completed"]
    assert len({line["request_id"] for line in completed}) == pictures
    assert {(line["worker_id"], line["step"], line["attempt"]) for line in completed} == {(who["worker_id"], STEPS, 1)}
    calls = {line["request_id"] for line in lines if line["event"] == "call" and line.get("status") == 200}
    assert {line["request_id"].rpartition("-")[0] for line in completed} <= calls
