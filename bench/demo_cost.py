"""``python -m bench.demo_cost``: how long the demo checkpoint takes for a picture, and for a step of many."""

import json
import os
import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
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
    # Everything is measured once a round, so that a slow moment of the machine is spread over all of it.
    measured: dict[str, list[float]] = {}
    for _ in range(ROUNDS + 1):
        measured.setdefault("picture", []).append(_seconds(lambda: draw(pipeline, ["red apple"], seed=7)))
        for requests in REQUESTS:
            step = _step(pipeline.transformer, requests)
            measured.setdefault(f"step of {requests}", []).append(_seconds(step))
    seconds = {name: values[1:] for name, values in measured.items()}  # the first round pays for one-off work
    table = Table("what", "median ms", "least", "most", "ms a request", title=f"{threads} threads, {ROUNDS} rounds")
    for name, values in seconds.items():
        requests = 1 if name == "picture" else int(name.rpartition(" ")[2])
        middle, least, most = (1000 * figure for figure in (statistics.median(values), min(values), max(values)))
        table.add_row(name, f"{middle:.1f}", f"{least:.1f}", f"{most:.1f}", f"{middle / requests:.1f}")
    Console().print(table)
    if json_file:
        json_file.write_text(json.dumps(seconds, indent=2) + "\n")


def _step(transformer, requests: int):
    """One forward of ``requests`` requests of 64 by 64 pixels with guidance, so of twice as many rows."""
    config, rows = transformer.config, 2 * requests
    side = config.sample_size
    inputs = {
        "hidden_states": torch.randn(rows, config.in_channels, side, side),
        "timestep": torch.full((rows,), 500.0),
        "encoder_hidden_states": torch.randn(rows, 2 * MAX_SEQUENCE_LENGTH, config.joint_attention_dim),
        "pooled_projections": torch.randn(rows, config.pooled_projection_dim),
    }

    @torch.inference_mode()
    def run() -> None:
        transformer(**inputs)

    return run


def _seconds(work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    typer.run(main)
