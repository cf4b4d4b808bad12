"""``python -m bench.overhead``: the budgets of the design, measured as it says there, one row each."""

import asyncio
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.budgets.core import CoreCost
from bench.budgets.gateway import GatewayLatency
from bench.budgets.idle import IdleTime
from bench.budgets.lost_worker import LostWorker
from bench.budgets.measurement import Measurement, Row
from bench.budgets.memory import Memory
from bench.budgets.refusal import Refusal
from bench.budgets.saturation import Saturation
from bench.budgets.sockets import SocketCycles
from bench.options import JsonFile, one_shape
from bench.report import show, write_json
from bench.stack import BenchError
from services.demo import DEMO_CHECKPOINT

ROWS = ("idle", "saturation", "core", "sockets", "gateway", "refusal", "memory", "lost-worker")
INTERRUPTED = 130


def main(
    rows: Annotated[
        list[str] | None, typer.Argument(help=f"Which rows: {', '.join(ROWS)}.", show_default="all")
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="Of saturation and lost-worker.")] = str(DEMO_CHECKPOINT),
    shape: Annotated[str, typer.Option(help="The same: WIDTHxHEIGHT/STEPS.")] = "64x64/20",
    guidance: Annotated[float, typer.Option(help="The same: guidance scale.")] = 4.0,
    rounds: Annotated[int, typer.Option(help="Measurements of each row that has several.", min=1)] = 5,
    images: Annotated[int, typer.Option(help="Pictures of each side of a saturation pair.", min=8)] = 48,
    calls: Annotated[int, typer.Option(help="Calls of a round of idle, gateway and refusal.", min=20)] = 500,
    cycles: Annotated[int, typer.Option(help="Plans and results of a round of core.", min=1)] = 20_000,
    seconds: Annotated[float, typer.Option(help="Of a round of sockets.", min=0.1)] = 4.0,
    requests: Annotated[int, typer.Option(help="Of memory; as many come before.", min=500)] = 10_000,
    interval: Annotated[
        int | None, typer.Option(help="Steps between two checkpoints of a request.", show_default="unknown")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure the budgets. Ctrl-C ends it with what was measured until then."""
    asked = rows or list(ROWS)
    unknown = [name for name in asked if name not in ROWS]
    if unknown:
        raise typer.BadParameter(f"there is no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    picture = one_shape(shape, "--shape")
    measurements: dict[str, Measurement] = {
        "idle": IdleTime(calls, rounds),
        "saturation": Saturation(checkpoint, picture, guidance, images, rounds),
        "core": CoreCost(cycles, rounds),
        "sockets": SocketCycles(seconds, rounds),
        "gateway": GatewayLatency(calls, rounds),
        "refusal": Refusal(calls, rounds),
        "memory": Memory(requests),
        "lost-worker": LostWorker(checkpoint, picture, guidance, interval, min(rounds, 3)),
    }
    found: list[Row] = []
    failed = interrupted = False
    for name in asked:
        measurement = measurements[name]
        try:
            asyncio.run(measurement.run())
        except KeyboardInterrupt:
            interrupted = True
        except BenchError as error:
            failed = True
            Console(stderr=True).print(f"{name}: {error}", highlight=False, markup=False)
        row = measurement.row()
        if row is not None:
            found.append(row)
        if interrupted:
            break
    _show(found)
    write_json(json_file, found)
    if interrupted or failed:
        raise typer.Exit(INTERRUPTED if interrupted else 1)


def _show(rows: list[Row]) -> None:
    table = Table("budget", "measured: median (least–most)", "met")
    for row in rows:
        table.add_row(row.budget, row.measured, {True: "yes", False: "no", None: "?"}[row.met])
    show(table)


if __name__ == "__main__":
    typer.run(main)
