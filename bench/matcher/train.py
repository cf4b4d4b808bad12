"""Trains the matcher and writes its weights: ``python -m bench.matcher.train FOLDER``."""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor
from torch.nn import functional

from bench.matcher.distortions import distort
from bench.matcher.drawings import UNKNOWN, Drawings, load_drawings
from bench.matcher.model import Matcher, Network
from services.demo.training.pictures import load_things
from services.demo.training.progress import steps, update_means
from services.demo.training.saving import SavedState, stop_after_saving_on_signals

BATCH = 128
PLAIN_SHARE = 0.6  # of a batch; the rest is recoloured
STEPS = 1600
LEARNING_RATE = 4e-3
WEIGHT_DECAY = 0.02
SMOOTHING = 0.1  # of the labels: keeps the order of the less likely captions meaningful


def train(drawings: Drawings, folder: Path, total: int, seed: int) -> Matcher:
    """A matcher trained for ``total`` steps; goes on from the state that an interrupted call left in ``folder``."""
    torch.manual_seed(seed)
    network = Network(len(drawings.names)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=total, pct_start=0.1)
    state = SavedState(folder / "matcher.pt", network=network, optimizer=optimizer, schedule=schedule)
    figures: dict[str, float] = {}
    for step in steps("matcher", state.load(), total, figures):
        random = np.random.default_rng((seed, step))
        torch.manual_seed(int(random.integers(2**62)))
        pictures, nouns, colours = _batch(drawings, random)
        pictures = distort(pictures, keep_hue=colours != UNKNOWN).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
            noun_logits, colour_logits = network(pictures)
        noun_loss = functional.cross_entropy(noun_logits.float(), nouns, label_smoothing=SMOOTHING)
        colour_loss = functional.cross_entropy(colour_logits.float(), colours, ignore_index=UNKNOWN)
        optimizer.zero_grad()
        (noun_loss + colour_loss).backward()
        optimizer.step()
        schedule.step()
        right = float((noun_logits.argmax(dim=-1) == nouns).float().mean())
        update_means(figures, noun=noun_loss.item(), colour=colour_loss.item(), right=right)
        state.save_now_and_then(step + 1)
    state.save(total)
    return Matcher(network, drawings.names)


def _batch(drawings: Drawings, random: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Random pictures (BATCH, 3, SIZE, SIZE) in 0 to 1, their nouns (BATCH,) and their colours (BATCH,)."""
    plain = round(PLAIN_SHARE * BATCH)
    chosen = np.concatenate(
        [
            random.integers(drawings.plain, size=plain),
            random.integers(drawings.plain, len(drawings.pictures), size=BATCH - plain),
        ]
    )
    random.shuffle(chosen)
    pictures = torch.from_numpy(drawings.pictures[chosen]).permute(0, 3, 1, 2).float() / 255
    return pictures, torch.from_numpy(drawings.nouns[chosen]), torch.from_numpy(drawings.colours[chosen])


def main(
    folder: Annotated[Path, typer.Argument(help="Where the fetched packages and the state of the training are kept.")],
    total: Annotated[int, typer.Option("--steps", help="How long to train.", min=1)] = STEPS,
    seed: Annotated[int, typer.Option(help="Of the first weights, of what is drawn and how it is distorted.")] = 0,
) -> None:
    """Trains the matcher on other emoji sets than the generator's, and writes its weights beside this program."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        drawings = load_drawings(load_things(folder), folder)
        typer.echo(f"{drawings.plain} drawings, {len(drawings.pictures) - drawings.plain} recoloured")
        stop_after_saving_on_signals()  # from here on: the drawings are no state, and are made anew each time
        train(drawings, folder, total, seed).save()
    except KeyboardInterrupt:
        typer.echo(f"Stopped; the same command goes on from the state in {folder}.", err=True)
        raise typer.Exit(130) from None


if __name__ == "__main__":
    typer.run(main)
