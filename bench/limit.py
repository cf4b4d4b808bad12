"""``python -m bench.limit``: how many images a second a checkpoint can draw here at best, by batch size."""

import os
from typing import Annotated

import typer
from msgspec import Struct
from rich.table import Table

from bench.asking import MAX_STEPS, guidance_in_words, own_shape, sampling_params
from bench.options import JsonFile, numbers, one_shape, positive
from bench.report import Spread, show, spread, write_json
from bench.workload import Shape
from common.errors import StepweaveError
from services.demo import DEMO_CHECKPOINT
from services.demo.training.progress import steps as progress
from services.worker import prepare_environment


class Limit(Struct, frozen=True, kw_only=True):
    """What one batch size comes to."""

    batch_size: int
    images_s: Spread
    seconds: Spread  # from the prompts to the files


def main(
    checkpoint: Annotated[str, typer.Option(help="A diffusers folder or a hub id.")] = str(DEMO_CHECKPOINT),
    shape: Annotated[
        str | None, typer.Option(help="WIDTHxHEIGHT/STEPS.", show_default="what the checkpoint draws by default")
    ] = None,
    guidance: Annotated[
        float | None,
        typer.Option(
            help="Scale of classifier-free guidance, however the model takes it; with most models 1 turns it off.",
            show_default="the checkpoint's own",
        ),
    ] = None,
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "1,2,4,8,16",
    rounds: Annotated[int, typer.Option(help="Measurements of each batch size.", min=1)] = 5,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; auto takes a GPU if there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "auto",
    threads: Annotated[int, typer.Option(help="Torch threads.", min=1)] = len(os.sched_getaffinity(0)),
    json_file: JsonFile = None,
) -> None:
    """Draw batches in a bare loop, with encoding, decoding and PNG files: the limit that a server can come near to."""
    sizes = list(numbers(batches, positive, "--batches").values)
    picture = None if shape is None else one_shape(shape, "--shape")
    try:
        title, measured = measure(checkpoint, picture, guidance, sizes, rounds, device, dtype, threads)
    except StepweaveError as error:  # the checkpoint, the device, or a size that the model does not draw
        raise typer.BadParameter(str(error)) from None
    limits = [
        Limit(
            batch_size=size,
            images_s=spread([size / seconds for seconds in values]),
            seconds=spread(values),
        )
        for size, values in measured.items()
        if values
    ]
    table = Table("batch", "images/s", "seconds a batch", title=title)
    for limit in limits:
        table.add_row(str(limit.batch_size), limit.images_s.shown(), limit.seconds.shown(3))
    show(table)
    write_json(json_file, limits)
    if any(len(values) < rounds for values in measured.values()):
        raise typer.Exit(130)


def measure(
    checkpoint: str,
    shape: Shape | None,
    guidance: float | None,
    sizes: list[int],
    rounds: int,
    device: str,
    dtype: str,
    threads: int,
) -> tuple[str, dict[int, list[float]]]:
    """What was drawn, in words, and the seconds of a batch, by batch size. What was measured before Ctrl-C is kept."""
    prepare_environment()  # before torch is imported, which reads it once
    from bench.bare_loop import BareLoop
    from services.worker.loader import load_pipeline

    pipeline = load_pipeline(checkpoint, device, dtype)
    profile = pipeline.profile(checkpoint, MAX_STEPS)
    picture = shape or own_shape(profile)
    params = sampling_params(profile, picture, guidance)
    title = f"{profile.pipeline}, {picture}, {guidance_in_words(params, profile)}, {threads} threads"
    measured: dict[int, list[float]] = {size: [] for size in sizes}
    loop = BareLoop(pipeline, params, threads)
    try:
        for size in sizes:
            loop.seconds(size)  # pays for one-off work
        # Every size is measured once a round, so that a slow moment of the machine is spread over all of them.
        for _ in progress("drawing", 0, rounds):
            for size in sizes:
                measured[size].append(loop.seconds(size))
    except KeyboardInterrupt:
        pass
    return title, measured


if __name__ == "__main__":
    typer.run(main)
