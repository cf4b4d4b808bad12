"""``python -m bench.replay``: drives a running server with a seeded workload and shows what its users would see."""

import asyncio
import enum
import statistics
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec import Struct
from rich.console import Console

from bench import gentd26, occupancy
from bench.client import Load, Result, connected
from bench.options import JsonFile, numbers, page_addresses, positive, server_address, shapes
from bench.report import Summary, Window, show, shown, summarize, summary_table, write_json
from bench.stack import BenchError
from bench.workload import Call, Mixes, at_rate, draw_calls, poisson_times
from services.demo.training.progress import steps as progress

INTERRUPTED = 130
SOLO_ROUNDS = 3


class Arrivals(enum.StrEnum):
    """When calls are made."""

    closed = "closed"  # each client makes its next call when the one before has ended
    poisson = "poisson"
    gentd26 = "gentd26"  # generated with the statistics of that trace
    trace = "trace"  # from a file


# Options that only some arrivals have a use for.
TRACED = (Arrivals.gentd26, Arrivals.trace)
NEEDS = {
    "rate": (Arrivals.poisson, *TRACED),
    "n": (Arrivals.closed, Arrivals.poisson),
    "trace": (Arrivals.trace,),
    "skip": TRACED,
}


class Plan(Struct, frozen=True):
    """A workload, and which of its calls are measured."""

    calls: list[Call]
    window: Window
    clients: int  # of the closed loop; 0: open loop


class Report(Struct, frozen=True, kw_only=True):
    """What is written as JSON."""

    url: str
    arrivals: str
    seed: int
    clients: int
    interrupted: bool
    summary: Summary
    occupancy: occupancy.Occupancy | None
    solo_s: dict[str, float]  # by what was asked for
    results: list[dict[str, object]]  # every call, warm-up too


def main(
    context: typer.Context,
    url: Annotated[
        str, typer.Option(help="Address of a running gateway.", callback=server_address)
    ] = "http://127.0.0.1:8000",
    arrivals: Annotated[Arrivals, typer.Option(help="When calls are made.")] = Arrivals.closed,
    clients: Annotated[int, typer.Option(help="Of the closed loop.", min=1)] = 16,
    rate: Annotated[float, typer.Option(help="Mean calls a second of the others.", min=1e-6)] = 1.0,
    calls: Annotated[int, typer.Option(help="Calls that are measured.", min=1)] = 100,
    warm_up: Annotated[
        int | None,
        typer.Option(
            help="Calls before them that are not; in an open loop as many follow.",
            min=0,
            show_default="as many as clients",
        ),
    ] = None,
    shape: Annotated[
        str, typer.Option("--shapes", help="WIDTHxHEIGHT/STEPS[=WEIGHT],…; demo, dataset-c or dataset-c-small.")
    ] = "demo",
    guidance: Annotated[str, typer.Option(help="Guidance scales: VALUE[=WEIGHT],…")] = "4",
    n: Annotated[str, typer.Option("-n", help="Pictures of a call: VALUE[=WEIGHT],…")] = "1",
    trace: Annotated[
        Path | None, typer.Option(help="A trace file: CSV, may be gzipped.", exists=True, dir_okay=False)
    ] = None,
    skip: Annotated[int, typer.Option(help="Calls at the beginning of the trace to leave out.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Same seed, same workload.", min=0)] = 0,
    solo: Annotated[bool, typer.Option(help="First measure each kind of call alone on the idle server.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds until a call is given up.", min=0.001)] = 600.0,
    metrics: Annotated[
        list[str] | None,
        typer.Option(help="A worker's metrics page, for occupancy; once for each worker.", callback=page_addresses),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Drive a server and report rates, latencies and outcomes. Ctrl-C ends it with what was measured until then.

    Steps and n of a trace, or of gentd26, are its own, and the steps in --shapes then count for nothing; sizes are
    those of --shapes, since traces have none.
    """
    for option, of in NEEDS.items():
        source = context.get_parameter_source(option)
        if source is not None and source.name == "COMMANDLINE" and arrivals not in of:
            name = f"-{option}" if option == "n" else f"--{option}"
            raise typer.BadParameter(f"{name} is for --arrivals {', '.join(of)}; {arrivals} has no use for it")
    mixes = Mixes(shapes(shape), numbers(guidance, float, "--guidance"), numbers(n, positive, "-n"))
    before = clients if warm_up is None else warm_up
    plan = make_plan(arrivals, clients, rate, calls, before, mixes, trace, skip, seed)
    run = Run(url, plan, timeout, solo, metrics or [])
    interrupted = failed = False
    try:
        asyncio.run(run.run())
    except KeyboardInterrupt:
        interrupted = True
    except BenchError as error:
        failed = True
        Console(stderr=True).print(str(error), highlight=False, markup=False)
    if failed and not run.results:
        raise typer.Exit(1)
    summary = summarize(run.results, plan.window, plan.clients > 0, run.solo_of if run.solo_s else None)
    show(summary_table({title(arrivals, clients, rate): summary}, f"{url}, seed {seed}"))
    if summary.filling:
        text = "no call had ended when the first measured one was due: images/s has the server's filling up in it"
        Console().print(f"{text}; a larger --warm-up leaves that out", highlight=False)
    for name, count in summary.errors.items():
        Console().print(f"{count} × {name}", highlight=False, markup=False)
    if run.occupancy is not None:
        rows = shown(run.occupancy.rows_a_step, digits=1)
        text = f"{rows} rows a forward pass; workers in a step {run.occupancy.busy:.0%} of the time"
        Console().print(text, highlight=False)
    write_json(
        json_file,
        Report(
            url=url,
            arrivals=arrivals.value,
            seed=seed,
            clients=plan.clients,
            interrupted=interrupted,
            summary=summary,
            occupancy=run.occupancy,
            solo_s=run.solo_s,
            results=[as_row(result) for result in run.results],
        ),
    )
    if interrupted or failed:
        raise typer.Exit(INTERRUPTED if interrupted else 1)


def title(arrivals: Arrivals, clients: int, rate: float) -> str:
    if arrivals is Arrivals.closed:
        return f"closed loop, {clients} clients (latency from sending)"
    own = " with its own steps and n" if arrivals in TRACED else ""
    return f"{arrivals.value}{own}, --rate {rate:g} (latency from the time due)"


def make_plan(
    arrivals: Arrivals,
    clients: int,
    rate: float,
    calls: int,
    warm_up: int,
    mixes: Mixes,
    trace: Path | None,
    skip: int,
    seed: int,
) -> Plan:
    """The workload. Calls follow the measured ones, so that these end under the same load: in a closed loop as many as
    there are clients, in an open one as many as come before."""
    window = Window(warm_up, warm_up + calls)
    count = window.end + (clients if arrivals is Arrivals.closed else warm_up)
    if arrivals is Arrivals.closed:
        return Plan(draw_calls(seed, [0.0] * count, mixes), window, clients)
    if arrivals is Arrivals.poisson:
        return Plan(draw_calls(seed, poisson_times(seed, rate, count), mixes), window, 0)
    if arrivals is Arrivals.gentd26:
        taken = gentd26.take(gentd26.generate(seed), skip, count)
    elif trace is None:
        raise typer.BadParameter("--arrivals trace needs the file: --trace FILE")
    else:
        try:
            taken = gentd26.take(iter(gentd26.read(trace)), skip, count)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error)) from None
    if len(taken) < count:
        needed = f"{calls} and {warm_up} each before and after them"
        raise typer.BadParameter(f"the trace has {len(taken)} calls after the first {skip}; needed are {needed}")
    return Plan(traced(seed, taken, mixes, rate), window, 0)


def traced(seed: int, taken: list[gentd26.TraceCall], mixes: Mixes, rate: float) -> list[Call]:
    """Calls with the times, steps and n of a trace, at that mean rate; what it does not say is drawn."""
    drawn = draw_calls(seed, at_rate([call.at_s for call in taken], rate), mixes)
    return [
        msgspec.structs.replace(
            call, n=of.n, shape=msgspec.structs.replace(call.shape, num_inference_steps=of.num_inference_steps)
        )
        for call, of in zip(drawn, taken, strict=True)
    ]


class Run:
    """One run against a server. What it has found stays when it is cancelled."""

    def __init__(self, url: str, plan: Plan, timeout_s: float, solo: bool, metrics: list[str]) -> None:
        self._url = url
        self._plan = plan
        self._timeout_s = timeout_s
        self._solo = solo
        self._metrics = metrics
        self._bounds = extremes(plan.calls)
        self.results: list[Result] = []
        self.solo_s: dict[str, float] = {}
        self.occupancy: occupancy.Occupancy | None = None

    async def run(self) -> None:
        async with connected(self._url, self._timeout_s) as load:
            if self._solo:
                await self._measure_solo(load)
                load.results = []
            self.results = load.results
            before = await occupancy.read(self._metrics)
            try:
                await self._drive(load)
            finally:
                after = await occupancy.read(self._metrics)
                if before is not None and after is not None:
                    self.occupancy = occupancy.between(before, after)

    async def _drive(self, load: Load) -> None:
        plan, ended = self._plan, asyncio.Semaphore(0)
        load.on_result = lambda result: ended.release()
        loop = load.closed_loop(plan.calls, plan.clients) if plan.clients else load.open_loop(plan.calls)
        driving = asyncio.create_task(loop)
        try:
            figures: dict[str, float] = {}
            driving.add_done_callback(lambda _: ended.release())  # also where it failed, and no more results come
            for _ in progress("calls", 0, len(plan.calls), figures):
                await ended.acquire()
                if driving.done():
                    break
                figures["failed"] = sum(result.outcome != "completed" for result in load.results)
            await driving
        finally:
            driving.cancel()
            await asyncio.gather(driving, return_exceptions=True)

    async def _measure_solo(self, load: Load) -> None:
        """The latency of each kind of call on the idle server: at the fewest and the most steps, and in between by
        interpolation, since it grows with each step by the same time."""
        asked = {label(call): call for bounds in self._bounds.values() for call in bounds}
        names = sorted(asked)
        for number in progress("solo", 0, len(names)):
            name = names[number]
            latencies = []
            for _ in range(SOLO_ROUNDS + 1):  # the first one may pay for one-off work
                result = await load.make(asked[name])
                if result.outcome != "completed":
                    raise BenchError(f"a call of {name} alone ended as {result.outcome}: {result.detail}")
                latencies.append(result.latency_s)
            self.solo_s[name] = statistics.median(latencies[1:])

    def solo_of(self, result: Result) -> float | None:
        """The latency of that call alone; None if it was not measured."""
        least, most = self._bounds[kind(result.call)]
        low, high = self.solo_s.get(label(least)), self.solo_s.get(label(most))
        if low is None or high is None:
            return None
        span = most.shape.num_inference_steps - least.shape.num_inference_steps
        share = (result.call.shape.num_inference_steps - least.shape.num_inference_steps) / span if span else 0.0
        return low + share * (high - low)


def extremes(calls: list[Call]) -> dict[str, tuple[Call, Call]]:
    """By kind, the calls with the fewest and the most steps."""
    groups: dict[str, list[Call]] = {}
    for call in calls:
        groups.setdefault(kind(call), []).append(call)
    return {name: (min(group, key=_steps), max(group, key=_steps)) for name, group in groups.items()}


def _steps(call: Call) -> int:
    return call.shape.num_inference_steps


def kind(call: Call) -> str:
    """What decides a call's solo latency, beside its steps."""
    guided = "guided" if call.guidance_scale > 1 else "unguided"
    return f"{call.shape.size}, {guided}, n={call.n}"


def label(call: Call) -> str:
    return f"{kind(call)}, {call.shape.num_inference_steps} steps"


def as_row(result: Result) -> dict[str, object]:
    """A result for the file, flat."""
    call = result.call
    asked = {"number": call.number, "size": call.shape.size, "steps": call.shape.num_inference_steps, "n": call.n}
    times = {"due_s": result.due_s, "sent_s": result.sent_s, "done_s": result.done_s}
    return {**asked, "guidance_scale": call.guidance_scale, **times, "outcome": result.outcome, "detail": result.detail}


if __name__ == "__main__":
    typer.run(main)
