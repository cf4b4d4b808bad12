"""``python -m bench.compare``: Stepweave beside other ways to serve the same model on this machine, in one run."""

import asyncio
import os
from typing import Annotated

import typer
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from bench.client import connected
from bench.options import JsonFile, numbers, shapes
from bench.report import Spread, Summary, Window, show, shown, spread, summarize, write_json
from bench.stack import BenchError, Processes, free_port
from bench.workload import Mix, Mixes, draw_calls
from services.demo import DEMO_CHECKPOINT
from services.demo.training.progress import steps as progress

INTERRUPTED = 130
SYSTEMS = ("stepweave", "lock", "litserve")
TITLES = {
    "stepweave": "Stepweave",
    "lock": "diffusers pipeline behind a lock",
    "litserve": "static batches of whole requests (LitServe)",
}


class Compared(Struct, frozen=True, kw_only=True):
    """One system over all rounds."""

    system: str
    images_s: Spread
    p50_s: Spread | None  # None: in some round more than half of the calls failed
    p95_s: Spread | None
    failed: int  # calls
    rounds: list[Summary]


def main(
    systems: Annotated[
        list[str] | None, typer.Argument(help=f"Which: {', '.join(SYSTEMS)}.", show_default="all")
    ] = None,
    shape: Annotated[
        str, typer.Option("--shapes", help="WIDTHxHEIGHT/STEPS[=WEIGHT],…; demo or dataset-c-small.")
    ] = "demo",
    guidance: Annotated[str, typer.Option(help="Guidance scales: VALUE[=WEIGHT],…")] = "4",
    clients: Annotated[int, typer.Option(help="Each makes its next call when the one before has ended.", min=1)] = 16,
    calls: Annotated[int, typer.Option(help="Calls of each system in each round that are measured.", min=1)] = 64,
    rounds: Annotated[int, typer.Option(help="Times that each system has its turn.", min=1)] = 5,
    batch: Annotated[int, typer.Option(help="Requests in a step, and in a static batch.", min=1)] = 8,
    batch_timeout: Annotated[float, typer.Option(help="Seconds that a static batch waits to be full.", min=0)] = 0.05,
    threads: Annotated[int, typer.Option(help="Torch threads of each.", min=1)] = len(os.sched_getaffinity(0)),
    seed: Annotated[int, typer.Option(help="Of the workload.", min=0)] = 0,
    json_file: JsonFile = None,
) -> None:
    """Serve the demo model by each system, with 16 clients, turn by turn. Only the one whose turn it is runs.

    Ctrl-C ends it with what was measured until then.
    """
    asked = systems or list(SYSTEMS)
    unknown = [name for name in asked if name not in SYSTEMS]
    if unknown:
        raise typer.BadParameter(f"there is no {unknown[0]!r}; there are {', '.join(SYSTEMS)}")
    mixes = Mixes(shapes(shape), numbers(guidance, float, "--guidance"), Mix((1,), (1,)))
    comparison = Comparison(asked, mixes, clients, calls, seed)
    interrupted = failed = False
    try:
        asyncio.run(comparison.run(rounds, commands(batch, batch_timeout, threads)))
    except KeyboardInterrupt:
        interrupted = True
    except BenchError as error:
        failed = True
        Console(stderr=True).print(str(error), highlight=False, markup=False)
    found = [compared(name, summaries) for name, summaries in comparison.summaries.items() if summaries]
    _show(found, f"{shape}, guidance {guidance}, {clients} clients, {threads} threads, {calls} calls a round")
    write_json(json_file, found)
    if interrupted or failed:
        raise typer.Exit(INTERRUPTED if interrupted else 1)


def commands(batch: int, batch_timeout: float, threads: int) -> dict[str, tuple[list[str], str]]:
    """By system: the arguments of `python -m` that start it, PORT standing for its port, and its health page."""
    serve = ["services.cli", "serve", "--port", "PORT", "--max-num-seqs", str(batch), "--threads", str(threads)]
    other = [str(DEMO_CHECKPOINT), "PORT", str(threads)]
    return {
        "stepweave": ([*serve, "--log-level", "warning", "--config", os.devnull], "/health/ready"),
        "lock": (["bench.lock_server", *other], "/health"),
        "litserve": (["bench.litserve_server", *other, str(batch), str(batch_timeout)], "/health"),
    }


class Comparison:
    """Rounds, in each of which every system has its turn. What was measured stays when it is cancelled."""

    def __init__(self, systems: list[str], mixes: Mixes, clients: int, calls: int, seed: int) -> None:
        self._systems = systems
        self._mixes = mixes
        self._clients = clients
        self._calls = calls
        self._seed = seed
        self.summaries: dict[str, list[Summary]] = {name: [] for name in systems}

    async def run(self, rounds: int, commands: dict[str, tuple[list[str], str]]) -> None:
        figures: dict[str, float] = {}
        turns = [(number, name) for number in range(rounds) for name in self._order(number)]
        for turn in progress("comparing", 0, len(turns), figures):
            number, name = turns[turn]
            port = free_port()
            command, health = commands[name]
            # Started for its turn and ended with it: even an idle server takes time of the machine that others then
            # lack, and a stopped one could not notice this program's end.
            with Processes() as processes:
                processes.start(name, [str(port) if part == "PORT" else part for part in command])
                url = f"http://127.0.0.1:{port}"
                await processes.until_ready(url, health)
                summary = await self._turn(url, number)
                processes.check()
            self.summaries[name].append(summary)
            figures[name] = summary.images_s or 0.0

    def _order(self, number: int) -> list[str]:
        """Another one is first in each round."""
        first = number % len(self._systems)
        return self._systems[first:] + self._systems[:first]

    async def _turn(self, url: str, number: int) -> Summary:
        """All systems get the same calls. Each client makes two before those that are measured, which pay for one-off
        work, and one after them, so that all are at work meanwhile; all have ended when this returns."""
        window = Window(2 * self._clients, 2 * self._clients + self._calls)
        calls = draw_calls(self._seed + number, [0.0] * (window.end + self._clients), self._mixes)
        async with connected(url) as load:
            await load.closed_loop(calls, self._clients)
        return summarize(load.results, window, closed=True)


def compared(system: str, summaries: list[Summary]) -> Compared:
    """Of at least one round."""
    return Compared(
        system=system,
        images_s=spread([summary.images_s or 0.0 for summary in summaries]),
        p50_s=_percentile(summaries, "p50"),
        p95_s=_percentile(summaries, "p95"),
        failed=sum(summary.calls - summary.outcomes.get("completed", 0) for summary in summaries),
        rounds=summaries,
    )


def _percentile(summaries: list[Summary], name: str) -> Spread | None:
    values = [summary.latency_s[name] for summary in summaries]
    reached = [value for value in values if value is not None]
    return spread(reached) if len(reached) == len(values) else None


def _show(found: list[Compared], title: str) -> None:
    table = Table("system", "images/s", "p50, s", "p95, s", "failed", title=f"{title}; median (least–most) of rounds")
    for system in found:
        latencies = [each.shown() if each is not None else shown(None) for each in (system.p50_s, system.p95_s)]
        table.add_row(TITLES[system.system], system.images_s.shown(), *latencies, str(system.failed))
    show(table)


if __name__ == "__main__":
    typer.run(main)
