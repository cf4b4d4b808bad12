"""The parts of the budgets' measurements that need no model: what they count, and the peers that they drive."""

from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from bench import overhead
from bench.budgets.core import CoreCost, VirtualFleet
from bench.budgets.gateway import GatewayLatency
from bench.budgets.idle import REQUESTS, STEPS, gaps, staggered
from bench.budgets.sockets import SocketCycles
from bench.recording import Durations, Spec, Step, command, read_steps
from bench.stack import BenchError, Processes, Stack


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


async def test_a_real_gateway_is_timed_between_a_client_and_a_backend_that_answers_at_once() -> None:
    latency = GatewayLatency(calls=5, rounds=1)
    await latency.run()
    row = latency.row()
    assert row is not None
    assert 0 < row.figures["12 kB"]["p50"].median < 1


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
