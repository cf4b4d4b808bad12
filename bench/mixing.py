"""``python -m bench.mixing``: what it gains that requests of different guidance and sizes share a forward pass."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from msgspec import Struct
from msgspec.structs import replace
from rich.table import Table

from bench.asking import MAX_STEPS, own_shape, sampling_params
from bench.options import JsonFile, numbers, shapes
from bench.report import Spread, show, spread, write_json
from bench.workload import Shape
from common.errors import ConfigError, StepweaveError
from common.messages import ModelProfile
from common.params import SamplingParams
from common.rows import uses_cfg
from services.demo import DEMO_CHECKPOINT
from services.demo.training.progress import steps as progress
from services.scheduler.key import SamplingParamsKey, request_shape
from services.worker import prepare_environment

LOADS = ("guidance", "cfg", "sizes", "everything")
SEED_MIXES = ("steps",)  # what may differ in a homogeneous group: `SamplingParamsKey` has all else
INTERRUPTED = 130

Group = list[SamplingParams]
Ways = dict[str, list[list[Group]]]  # by name: stages of groups, see `GroupRuns.run`


class Mixing(Struct, frozen=True, kw_only=True):
    """What one way of running a load comes to."""

    load: str  # what its requests differ in
    way: str
    groups: int
    forwards: int
    rows_a_forward: float
    padding: float  # image tokens that padding adds, as a share of the real ones
    seconds: Spread
    times_mixed: Spread  # its seconds over those of the mixed group, round by round


def main(
    loads: Annotated[
        list[str] | None,
        typer.Argument(help=f"What the requests differ in: {', '.join(LOADS)}.", show_default="all that can be mixed"),
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="A diffusers folder or a hub id.")] = str(DEMO_CHECKPOINT),
    shape_list: Annotated[
        str | None,
        typer.Option(
            "--shapes",
            help="WIDTHxHEIGHT/STEPS,…: the requests have them in turn; those of the first one's size where sizes are "
            "not to differ.",
            show_default="the checkpoint's own size, narrower ones if it mixes sizes, with all and 3/4 of its steps",
        ),
    ] = None,
    guidance: Annotated[
        str, typer.Option(help="Scales of classifier-free guidance: the requests that have it take them in turn.")
    ] = "2,3,4,5,6,7,8,9",
    requests: Annotated[int, typer.Option(help="How many there are.", min=2)] = 8,
    rounds: Annotated[int, typer.Option(help="Measurements of each.", min=1)] = 5,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; auto takes a GPU if there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "auto",
    threads: Annotated[int, typer.Option(help="Torch threads.", min=1)] = len(os.sched_getaffinity(0)),
    json_file: JsonFile = None,
) -> None:
    """Denoise the same requests in one group and in homogeneous ones. Ctrl-C ends it with what was measured until then.

    The homogeneous groups are run in turns, a step each, and one group after another.
    """
    unknown = [name for name in loads or [] if name not in LOADS]
    if unknown:
        raise typer.BadParameter(f"there is no load {unknown[0]!r}; there are {', '.join(LOADS)}")
    pictures = None if shape_list is None else list(shapes(shape_list).values)
    scales = list(numbers(guidance, float, "--guidance").values)

    prepare_environment()  # before torch is imported, which reads it once
    from services.worker.loader import load_pipeline

    try:
        pipeline = load_pipeline(checkpoint, device, dtype)
        profile = pipeline.profile(checkpoint, MAX_STEPS)
        pictures = pictures or default_shapes(profile)
        ways = ways_to_run(profile, build_loads(profile, pictures, scales, requests), loads)
        measured = measure(pipeline, ways, rounds, threads)
    except StepweaveError as error:  # the checkpoint, the device, or a request that the model does not take
        raise typer.BadParameter(str(error)) from None
    results = [
        summarize(load, way, stages, measured[load])
        for load, of in ways.items()
        for way, stages in of.items()
        if measured[load]
    ]
    _show(results, f"{profile.pipeline}, {requests} requests, {', '.join(map(str, pictures))}, {threads} threads")
    write_json(json_file, results)
    if any(len(found) < rounds for found in measured.values()):
        raise typer.Exit(INTERRUPTED)


def default_shapes(profile: ModelProfile) -> list[Shape]:
    """The model's own size, with all and with three quarters of its steps; and where it mixes sizes, the same at three
    quarters and at half of the width."""
    own = own_shape(profile)
    fewer = max(1, own.num_inference_steps * 3 // 4)
    found = [own, replace(own, num_inference_steps=fewer)]
    if "resolution" in profile.mixes:
        rule = profile.size
        for width, steps in ((own.width * 3 // 4, own.num_inference_steps), (own.width // 2, fewer)):
            found.append(Shape(max(width // rule.multiple * rule.multiple, rule.min_side), own.height, steps))
    return found


def build_loads(
    profile: ModelProfile, pictures: Sequence[Shape], scales: Sequence[float], count: int
) -> dict[str, list[SamplingParams]]:
    """`count` requests for each of `LOADS`. Raises `ConfigError` for a scale with which guidance is off."""
    off = min(profile.cfg.threshold, 1.0)  # of a distilled model, whose guidance is never on, no scale is too small
    for scale in scales:
        if math.isfinite(profile.cfg.threshold) and not uses_cfg(sampling_params(profile, pictures[0], scale), profile):
            raise ConfigError(
                f"--guidance {scale:g} turns guidance off; on this model it is on above {profile.cfg.threshold:g}"
            )

    def asked(of: Sequence[Shape], guidance: Sequence[float]) -> list[SamplingParams]:
        # Two in a row have one shape, so that each is asked for with and without guidance.
        return [
            sampling_params(profile, of[number // 2 % len(of)], guidance[number % len(guidance)], number)
            for number in range(count)
        ]

    one_size = [picture for picture in pictures if picture.size == pictures[0].size]
    return {
        "guidance": asked(one_size, scales),
        "cfg": asked(one_size, [scales[0], off]),
        "sizes": asked(pictures, scales[:1]),
        "everything": asked(pictures, [each for scale in scales for each in (scale, off)]),
    }


def ways_to_run(
    profile: ModelProfile, requests: Mapping[str, Sequence[SamplingParams]], asked: Sequence[str] | None
) -> dict[str, Ways]:
    """How each load is run. Those whose requests are all in one homogeneous group are left out, since mixing can gain
    nothing; raises `ConfigError` if they were asked for."""
    found: dict[str, Ways] = {}
    for load in asked or LOADS:
        mixed = grouped(requests[load], profile)
        homogeneous = grouped(requests[load], replace(profile, mixes=SEED_MIXES))
        if len(homogeneous) > 1:
            found[load] = {
                "mixed": [mixed],
                "in turns": [homogeneous],
                "one by one": [[group] for group in homogeneous],
            }
        elif asked:
            raise ConfigError(
                f"the requests of {load} would not differ: give several --guidance scales, or --shapes of several sizes"
            )
    return found


def grouped(requests: Sequence[SamplingParams], profile: ModelProfile) -> list[Group]:
    """The groups that the scheduler may make of them, by what the profile says that the model mixes."""
    groups: dict[SamplingParamsKey, Group] = {}
    for params in requests:
        groups.setdefault(request_shape(params, profile).key, []).append(params)
    return list(groups.values())


def measure(pipeline: Any, ways: Mapping[str, Ways], rounds: int, threads: int) -> dict[str, list[dict[str, Any]]]:
    """For each load and round, a `Run` of each way. What was measured before Ctrl-C is kept."""
    from bench.group_runs import GroupRuns, Run

    runs = GroupRuns(pipeline, threads)
    measured: dict[str, list[dict[str, Run]]] = {load: [] for load in ways}
    figures: dict[str, float] = {}
    try:
        for of in ways.values():
            for stages in of.values():
                runs.run(stages)  # pays for one-off work
        for number in progress("mixing", 0, rounds, figures):
            for load, of in ways.items():
                # Another way is first each time, so that a slow moment of the machine is not always the same one's.
                first = number % len(of)
                found = {way: runs.run(of[way]) for way in [*list(of)[first:], *list(of)[:first]]}
                measured[load].append(found)
                figures[load] = found["in turns"].seconds / found["mixed"].seconds
    except KeyboardInterrupt:
        pass
    return measured


def summarize(load: str, way: str, stages: Sequence[Sequence[Group]], found: Sequence[Mapping[str, Any]]) -> Mixing:
    """Figures of a way from at least one round. What is counted is the same in each of them."""
    run = found[0][way]
    return Mixing(
        load=load,
        way=way,
        groups=sum(len(groups) for groups in stages),
        forwards=run.forwards,
        rows_a_forward=run.rows / run.forwards,
        padding=run.padded_tokens / run.tokens - 1,
        seconds=spread([each[way].seconds for each in found]),
        times_mixed=spread([each[way].seconds / each["mixed"].seconds for each in found]),
    )


def _show(results: Sequence[Mixing], title: str) -> None:
    table = Table("differ in", "forwards\n× rows", "padded", "seconds", "× mixed", title=title)
    for result in results:
        if result.way == "mixed":
            table.add_section()
            table.add_row(result.load)
        table.add_row(
            f" {result.groups} {result.way}",
            f"{result.forwards} × {result.rows_a_forward:.1f}",
            f"{result.padding:.0%}",
            result.seconds.shown(3),
            "" if result.way == "mixed" else result.times_mixed.shown(),
        )
    show(table)


if __name__ == "__main__":
    typer.run(main)
