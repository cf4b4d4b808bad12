"""``python -m bench.demo_cost``: how long the demo checkpoint takes for a picture, and for a step of many."""

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from diffusers import StableDiffusion3Pipeline
from rich.console import Console
from rich.table import Table

from bench.demo import MAX_SEQUENCE_LENGTH, draw, load_pipeline
from services.demo import DEMO_CHECKPOINT

REQUESTS = (1, 2, 4, 8, 16)
ROUNDS = 9


def main(
    checkpoint: Annotated[Path, typer.Option(help="The checkpoint to measure.")] = DEMO_CHECKPOINT,
    threads: Annotated[int, typer.Option(help="Torch threads.", min=1)] = len(os.sched_getaffinity(0)),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file too.")] = None,
) -> None:
    """Time one picture of 20 steps with guidance, and one denoise step with guidance of 1 to 16 requests."""
    torch.set_num_threads(threads)
    pipeline = load_pipeline(checkpoint)
    requests = {"picture": 1} | {f"step of {count}": count for count in REQUESTS}
    work: dict[str, Callable[[], object]] = {"picture": lambda: draw(pipeline, ["red apple"], seed=7)}
    work |= {f"step of {count}": _step(pipeline, count) for count in REQUESTS}
    # Everything is measured once a round, so that a slow moment of the machine is spread over all of it.
    rounds = [{name: _seconds(piece) for name, piece in work.items()} for _ in range(ROUNDS + 1)]
    seconds = {name: [of[name] for of in rounds[1:]] for name in work}  # the first round pays for one-off work
    table = Table("what", "median ms", "least", "most", "ms a request", title=f"{threads} threads, {ROUNDS} rounds")
    for name, values in seconds.items():
        middle, least, most = (1000 * figure for figure in (statistics.median(values), min(values), max(values)))
        table.add_row(name, f"{middle:.1f}", f"{least:.1f}", f"{most:.1f}", f"{middle / requests[name]:.1f}")
    Console().print(table)
    if json_file:
        json_file.write_text(json.dumps(seconds, indent=2) + "\n")


def _step(pipeline: StableDiffusion3Pipeline, requests: int) -> Callable[[], None]:
    """One forward of ``requests`` requests of 64 by 64 pixels with guidance, so of twice as many rows."""
    transformer, rows = pipeline.transformer, 2 * requests
    config = transformer.config
    side, tokens = config.sample_size, pipeline.tokenizer.model_max_length + MAX_SEQUENCE_LENGTH
    inputs = {
        "hidden_states": torch.randn(rows, config.in_channels, side, side),
        "timestep": torch.full((rows,), 500.0),
        "encoder_hidden_states": torch.randn(rows, tokens, config.joint_attention_dim),
        "pooled_projections": torch.randn(rows, config.pooled_projection_dim),
    }

    @torch.inference_mode()
    def run() -> None:
        transformer(**inputs)

    return run


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    typer.run(main)
