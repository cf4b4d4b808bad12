"""The replay command: its workloads, what it measures, and how it ends."""

import asyncio
import contextlib
import io
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import typer
from aiohttp import web
from rich.console import Console

from bench import replay
from bench.client import Result
from bench.replay import Arrivals, Plan, Run, make_plan
from bench.report import Window, summarize, summary_table
from bench.stack import BenchError
from bench.workload import Mix, Mixes, parse_shapes
from tests.bench.builders import MIXES, call, result
from tests.bench.fake_server import fake_server, pictures, refusal

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 60.0


def plan(arrivals: Arrivals, **changes: Any) -> Plan:
    values: dict[str, Any] = {"clients": 3, "rate": 2.0, "calls": 10, "warm_up": 4, "mixes": MIXES}
    return make_plan(arrivals, **(values | {"trace": None, "skip": 0, "seed": 0} | changes))


@pytest.mark.parametrize("arrivals", [Arrivals.poisson, Arrivals.gentd26])
def test_as_many_calls_follow_those_that_are_measured_in_an_open_loop_as_come_before(arrivals: Arrivals) -> None:
    made = plan(arrivals)
    assert (len(made.calls), made.window) == (4 + 10 + 4, Window(4, 14))


def test_a_closed_loop_has_calls_before_and_after_those_that_are_measured() -> None:
    made = plan(Arrivals.closed)
    assert (len(made.calls), made.window, made.clients) == (4 + 10 + 3, Window(4, 14), 3)
    assert [call.number for call in made.calls] == list(range(17))


@pytest.mark.parametrize("arrivals", [Arrivals.poisson, Arrivals.gentd26])
def test_an_open_loop_has_the_rate_that_was_asked_for(arrivals: Arrivals) -> None:
    made = plan(arrivals, calls=2_000, rate=5.0)
    assert (made.clients, len(made.calls)) == (0, 2_008)
    assert len(made.calls) / made.calls[-1].at_s == pytest.approx(5.0, rel=0.1)


def test_a_trace_brings_times_steps_and_n_and_the_rest_is_drawn(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,kind,n,steps\n0,A,1,9\n100,A,1,30\n110,A,4,40\n120,A,8,28\n140,A,2,50\n")
    mixes = Mixes(parse_shapes("96x64/20"), Mix((1.5,), (1,)), Mix((3,), (1,)))
    made = plan(Arrivals.trace, trace=trace, skip=1, warm_up=1, calls=2, rate=1.0, mixes=mixes)
    assert [call.at_s for call in made.calls] == [0.0, 0.75, 1.5, 3.0]
    assert [(str(call.shape), call.n) for call in made.calls] == [
        ("96x64/30", 1),
        ("96x64/40", 4),
        ("96x64/28", 8),
        ("96x64/50", 2),
    ]
    assert {call.guidance_scale for call in made.calls} == {1.5}


def test_a_trace_that_is_missing_or_too_short_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,kind,n,steps\n0,A,1,9\n")
    with pytest.raises(typer.BadParameter, match="--trace FILE"):
        plan(Arrivals.trace)
    with pytest.raises(
        typer.BadParameter, match="has 1 calls after the first 0; needed are 10 and 4 each before and after"
    ):
        plan(Arrivals.trace, trace=trace)


async def test_each_kind_of_call_is_first_made_alone() -> None:
    async def answer(body: dict[str, Any]) -> web.Response:
        return pictures(body)

    calls = [call(0), call(1, n=2), call(2)]
    async with fake_server(answer) as server:
        run = Run(server.url, Plan(calls, Window(0, 3), clients=1), DEADLINE_S, solo=True, metrics=[])
        await run.run()
    assert sorted(run.solo_s) == ["64x64, guided, n=1, 20 steps", "64x64, guided, n=2, 20 steps"]
    assert len(server.bodies) == 2 * 4 + 3
    assert [found.call.number for found in run.results] == [0, 1, 2]  # solo calls are no results
    summary = summarize(run.results, Window(0, 3), closed=True, solo=run.solo_of)
    assert summary.over_solo is not None
    assert summary.over_solo["p50"] is not None


def test_solo_latency_between_the_fewest_and_the_most_steps_is_interpolated() -> None:
    calls = [call(number, shape=parse_shapes(f"64x64/{steps}").values[0]) for number, steps in enumerate((10, 30, 25))]
    run = Run("http://127.0.0.1:1", Plan(calls, Window(0, 3), clients=1), 1.0, solo=True, metrics=[])
    run.solo_s = {"64x64, guided, n=1, 10 steps": 1.0, "64x64, guided, n=1, 30 steps": 3.0}
    results = [Result(one, due_s=0.0, sent_s=0.0, done_s=1.0, outcome="completed") for one in calls]
    assert [run.solo_of(result) for result in results] == [1.0, 3.0, 2.5]


async def test_a_server_that_fails_a_single_call_is_not_put_under_load() -> None:
    async def answer(_: dict[str, Any]) -> web.Response:
        return refusal(400, "bad_size")

    async with fake_server(answer) as server:
        run = Run(server.url, Plan([call(0)], Window(0, 1), clients=1), DEADLINE_S, solo=True, metrics=[])
        with pytest.raises(BenchError, match="alone ended as client_error: 400 bad_size"):
            await run.run()
    assert len(server.bodies) == 1


def test_the_table_says_what_was_due_and_whose_steps_they_are() -> None:
    assert "its own steps and n" in replay.title(Arrivals.gentd26, 16, 0.3)
    summary = summarize([result(number, 2.0 * number, 2.0 * number + 1) for number in range(3)], Window(0, 3), False)
    out = io.StringIO()
    Console(file=out, width=200).print(summary_table({"": summary}, ""))
    assert "0.50 calls/s, 0.50 images/s" in out.getvalue()


@contextlib.asynccontextmanager
async def replaying(url: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python -m bench.replay`, ended with the test if it has not ended before."""
    command = [sys.executable, "-m", "bench.replay", "--url", url, "--no-solo", *arguments]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_the_report_counts_every_outcome(tmp_path: Path) -> None:
    refused = 0

    async def answer(body: dict[str, Any]) -> web.Response:
        nonlocal refused
        if body["seed"] % 32 == 0:
            refused += 1
            return refusal(429, "queue_full")
        return pictures(body, denoise_s=0.1)

    file = tmp_path / "figures.json"
    arguments = ["--arrivals", "poisson", "--rate", "100", "--calls", "20", "--warm-up", "4", "--json", str(file)]
    async with fake_server(answer) as server, replaying(server.url, *arguments) as process:
        out, error = await process.communicate()
    assert process.returncode == 0, error.decode()
    report = json.loads(file.read_text())
    assert report["summary"]["outcomes"] == {"completed": 10, "refused": 10}
    assert report["summary"]["errors"] == {"refused: 429 queue_full": 10}
    assert report["summary"]["latency_s"]["p95"] is None
    assert report["summary"]["completed_latency_s"]["p95"] > 0
    assert report["summary"]["late_start_s"] < 1
    assert report["interrupted"] is False
    assert len(report["results"]) == 28
    assert refused == 14
    text = out.decode()
    assert "completed 10, refused 10" in text
    assert "10 × refused: 429 queue_full" in text


async def test_ctrl_c_shows_what_was_measured_so_far(tmp_path: Path) -> None:
    async def answer(body: dict[str, Any]) -> web.StreamResponse:
        return pictures(body) if body["seed"] < 16 * 6 else await asyncio.Future()

    file = tmp_path / "figures.json"
    arguments = ["--clients", "2", "--calls", "50", "--warm-up", "0", "--json", str(file)]
    async with fake_server(answer) as server, replaying(server.url, *arguments) as process:
        while len(server.bodies) < 8:
            server.called.clear()
            await server.called.wait()
        process.send_signal(signal.SIGINT)
        out, error = await process.communicate()
    assert process.returncode == 130, error.decode()
    report = json.loads(file.read_text())
    assert report["interrupted"] is True
    assert report["summary"]["outcomes"] == {"completed": 6, "interrupted": 2}
    assert "completed 6, interrupted 2" in out.decode()
    assert "Traceback" not in error.decode()
