"""``python -m bench.demo_quality``: whether the demo checkpoint draws what it is asked for, judged by the matcher."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.demo import draw, load_pipeline
from bench.matcher.measure import NOISE_ROUNDS, average, measure, noise_pictures
from bench.matcher.model import Matcher
from bench.matcher.prompts import PROMPTS
from bench.matcher.real import real_pictures
from services.demo import DEMO_CHECKPOINT
from services.demo.training.progress import steps as progress

SEEDS = (1, 2)
# What differs from the way the checkpoint is meant to be used: more of each should be visibly better.
SETTINGS = {
    "20 steps, guidance 4": {"steps": 20, "guidance_scale": 4.0},
    "4 steps, guidance 4": {"steps": 4, "guidance_scale": 4.0},
    "20 steps, guidance 1": {"steps": 20, "guidance_scale": 1.0},
}


def main(
    checkpoint: Annotated[Path, typer.Option(help="The checkpoint to measure.")] = DEMO_CHECKPOINT,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file too.")] = None,
) -> None:
    """Draw 64 prompts with 2 seeds and show how often the picture's own caption is found, between ceiling and floor."""
    matcher, pipeline = Matcher.load(), load_pipeline(checkpoint)
    captions = [prompt.caption for prompt in PROMPTS]
    figures = {"real pictures (ceiling)": measure(matcher, real_pictures())}
    settings = list(SETTINGS)
    for number in progress("drawing", 0, len(settings)):
        name = settings[number]
        figures[name] = average([measure(matcher, draw(pipeline, captions, seed, **SETTINGS[name])) for seed in SEEDS])
    figures["noise (floor)"] = average([measure(matcher, noise) for noise in noise_pictures(NOISE_ROUNDS, seed=0)])
    show(figures)
    if json_file:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")


def show(figures: dict[str, dict[str, float]]) -> None:
    """A table of shares, one column for each kind of picture."""
    table = Table("share of pictures", *figures)
    for name in next(iter(figures.values())):
        table.add_row(name, *(f"{shares[name]:.1%}" for shares in figures.values()))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
