"""The parts of the budgets' measurements that need no model: what they count, and the peers that they drive."""

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import typer
import zmq
from typer.testing import CliRunner

from bench import overhead
from bench.budgets.core import CoreCost, VirtualFleet
from bench.budgets.gateway import GatewayLatency, InstantBackend
from bench.budgets.idle import REQUESTS, STEPS, gaps, staggered
from bench.budgets.measurement import Row
from bench.budgets.sockets import WORKERS, SocketCycles, SocketFleet
from bench.budgets.virtual_worker import GATEWAY_ID, VirtualWorker
from bench.recording import Durations, Spec, Step, command, read_steps
from bench.stack import BenchError, Processes, Stack
from common import codec
from common import messages as m


def step(requests: int, idle_s: float) -> Step:
    return Step(idle_s, 0.005, {f"r{number}": 1 for number in range(requests)})


def test_idle_time_is_counted_between_the_first_and_the_last_full_step() -> None:
    steps = [step(1, 9.0), step(8, 8.0), step(8, 0.1), step(7, 0.2), step(8, 0.3), step(7, 9.0)]
    assert gaps(steps) == [0.1, 0.2, 0.3]
    assert gaps([step(7, 1.0)]) == []


def test_staggered_calls_leave_one_at_a_time_every_four_steps() -> None:
    calls = staggered(40)
    running = [call.shape.num_inference_steps for call in calls[:REQUESTS]]
    waiting = [call.shape.num_inference_steps for call in calls[REQUESTS:]]
    ends = []
    for now in range(1, 4 * STEPS):
        running = [left - 1 for left in running]
        for place, left in enumerate(running):
            if left == 0:
                ends.append(now)
                running[place] = waiting.pop(0)
    assert ends == list(range(4, 4 * STEPS, 4))


def test_a_record_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    record = tmp_path / "steps"
    assert read_steps(record) == []
    whole = msgspec.json.encode(step(2, 0.5)) + b"\n"
    record.write_bytes(whole + whole + b'{"idle')
    assert read_steps(record) == [step(2, 0.5)] * 2


def test_a_recorded_worker_is_told_what_to_do_on_its_command_line() -> None:
    spec = Spec("/somewhere/steps", Durations(step_s=0.001))
    module, argument = command(spec)
    assert module == "bench.recorded_worker"
    assert msgspec.json.decode(argument, type=Spec) == spec


async def test_the_core_is_timed_on_a_fleet_that_is_all_at_work() -> None:
    fleet = VirtualFleet(3)
    seconds = await fleet.seconds_a_cycle(300)
    assert 0 < seconds < 0.01
    assert await fleet.seconds_a_cycle(300) > 0


async def test_a_row_tells_of_what_was_measured_when_it_was_ended() -> None:
    cost = CoreCost(cycles=10, rounds=1, fleets=(2, 5))
    assert cost.row() is None
    await cost.run()
    row = cost.row()
    assert row is not None
    assert set(row.figures) == {"2 workers", "5 workers"}


async def test_a_real_scheduler_answers_the_fleet_on_sockets() -> None:
    cycles = SocketCycles(seconds=0.3, rounds=1)
    await cycles.run()
    row = cycles.row()
    assert row is not None
    assert row.figures["cycles_s"].median > 100
    assert 0 < row.figures["core_share"].median < 1.2


@contextlib.asynccontextmanager
async def fleet_at_work() -> AsyncIterator[SocketFleet]:
    """Virtual workers that a real scheduler keeps at work."""
    with Processes() as processes, zmq.Context() as context:
        address = f"ipc://{processes.folder}/scheduler"
        arguments = ["services.cli", "scheduler", "--bind", address, "--log-level", "warning", "--config", os.devnull]
        processes.start("scheduler", arguments)
        fleet = SocketFleet(context, address)
        try:
            await fleet.set_to_work(processes)
            yield fleet
        finally:
            fleet.close()


async def test_a_cycle_is_one_plan_and_one_result_with_all_eight_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    advanced: list[int] = []
    on_plan, step = VirtualWorker.on_plan, VirtualWorker.step

    def noted_plan(worker: VirtualWorker, plan: m.StepPlan) -> list[m.RequestReady]:
        planned.append(sum(len(group.requests) for group in plan.groups))
        return on_plan(worker, plan)

    def noted_step(worker: VirtualWorker) -> m.StepResult | None:
        result = step(worker)
        advanced.append(len(result.progress) if result is not None else 0)
        return result

    async with fleet_at_work() as fleet:
        monkeypatch.setattr(VirtualWorker, "on_plan", noted_plan)
        monkeypatch.setattr(VirtualWorker, "step", noted_step)
        cycles = await fleet.cycles(0.3)
    assert cycles > 30
    assert set(planned) == set(advanced) == {8}
    assert abs(len(planned) - cycles) <= WORKERS
    assert abs(len(advanced) - cycles) <= WORKERS


async def test_a_load_that_is_not_steady_is_no_figure() -> None:
    async with fleet_at_work() as fleet:
        fleet.gateway.send(codec.encode(m.AbortRequest(GATEWAY_ID, ("r3-5",), "nobody wants it")))
        with pytest.raises(BenchError, match="has 7 requests, not 8"):
            await fleet.cycles(20.0)


def test_a_share_that_is_not_full_is_told_and_decides_nothing() -> None:
    def row(cycles_s: float, share: float) -> Row:
        measured = SocketCycles(seconds=1.0, rounds=1)
        measured.rates, measured.shares = [cycles_s], [share]
        found = measured.row()
        assert found is not None
        return found

    assert [row(*each).met for each in ((5000, 0.95), (3000, 0.95), (5000, 0.5), (3000, 0.5))] == [
        True,
        False,
        True,
        None,
    ]
    assert "the bench's own workers, or others, were the slower side; 6000 (6000–6000)" in row(3000, 0.5).measured
    assert "slower" not in row(3000, 0.95).measured


async def test_a_real_gateway_is_timed_between_a_client_and_a_backend_that_answers_at_once() -> None:
    latency = GatewayLatency(calls=5, rounds=1)
    await latency.run()
    row = latency.row()
    assert row is not None
    assert 0 < row.figures["12 kB"]["p50"].median < 1


async def test_the_backend_reads_the_gateway_s_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> None:
    backends: list[InstantBackend] = []

    class Noted(InstantBackend):
        def __init__(self, address: str) -> None:
            super().__init__(address)
            backends.append(self)

    monkeypatch.setattr("bench.budgets.gateway.InstantBackend", Noted)
    calls = 10
    await GatewayLatency(calls, rounds=1).run()
    pictures = 2 * 2 * calls  # twice each of two sizes
    assert backends[0].acknowledged >= pictures - 2  # that of the last one, or two, nobody waited for


def test_processes_end_with_their_measurement_and_say_why_they_ended() -> None:
    with Processes() as processes:
        stack = Stack(processes)
        processes.check()
    assert stack.scheduler.poll() is not None
    assert stack.gateway.poll() is not None
    assert not processes.folder.exists()
    with Processes() as processes:
        child = processes.start("guest", ["services.cli", "gateway", "--no-such-flag"])
        child.wait(60)
        with pytest.raises(BenchError, match=r"the guest ended with exit code 2:(?s:.*)no-such-flag"):
            processes.check()


def test_an_unknown_row_is_refused_with_those_that_there_are() -> None:
    app = typer.Typer()
    app.command()(overhead.main)
    result = CliRunner().invoke(app, ["idel"])
    assert result.exit_code == 2
    assert "idle" in result.output
