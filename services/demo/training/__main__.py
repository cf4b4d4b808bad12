"""``python -m services.demo.training``: trains the demo checkpoint from nothing, or goes on where it was stopped."""

import re
from pathlib import Path
from typing import Annotated

import torch
import typer
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

from services.demo.training.captions import HELD_OUT, OPENINGS
from services.demo.training.colours import COLOURS
from services.demo.training.denoiser import Generator, train_denoiser
from services.demo.training.latents import encode
from services.demo.training.pictures import Thing, load_things
from services.demo.training.saving import stop_after_saving_on_signals
from services.demo.training.text import train_text
from services.demo.training.tokenizer import new_tokenizer
from services.demo.training.vae import train_vae
from services.demo.training.views import PictureBook

SCHEDULER_SHIFT = 1.5  # more of the steps where there is much noise, as the training times are shifted


def main(
    checkpoint: Annotated[Path, typer.Argument(help="The folder to write the finished checkpoint to.")],
    run: Annotated[Path, typer.Option(help="The folder for packages and saved states; go on by giving it again.")],
    steps: Annotated[int, typer.Option(help="Steps of the denoiser.")] = 12_500,
    seed: Annotated[int, typer.Option(help="Two runs with one seed see the same pictures in the same order.")] = 0,
) -> None:
    """Train the demo checkpoint: autoencoder, text encoders, denoiser."""
    stop_after_saving_on_signals()
    run.mkdir(parents=True, exist_ok=True)
    things = load_things(run / "packages")
    book = PictureBook(things, HELD_OUT)
    try:
        vae = train_vae(book, run, seed)
        latents = encode(book, vae, run, seed)
        encoders = train_text(things, latents[0], new_tokenizer(words_of(things)), run, seed)
        generator = train_denoiser(things, latents, encoders, run, seed, steps)
    except KeyboardInterrupt:
        typer.echo(f"Stopped; the same command goes on from the states in {run}.", err=True)
        raise typer.Exit(130) from None
    export(generator, vae, checkpoint)
    typer.echo(f"The checkpoint is in {checkpoint}.", err=True)


def words_of(things: list[Thing]) -> list[str]:
    """All words of all captions, names thrice as they are said most."""
    said = [*OPENINGS, *COLOURS]
    for thing in things:
        said += [thing.name] * 3 + [*thing.aliases, *thing.tags]
    return re.findall(r"[a-z]+", " ".join(said))


def export(generator: Generator, vae: AutoencoderKL, checkpoint: Path) -> None:
    """Writes a Stable Diffusion 3 pipeline without T5, in half precision."""
    tokenizer = generator.encoders.tokenizer
    pipeline = StableDiffusion3Pipeline(
        transformer=generator.transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SCHEDULER_SHIFT),
        vae=vae,
        text_encoder=generator.encoders.encoders[0],
        tokenizer=tokenizer,
        text_encoder_2=generator.encoders.encoders[1],
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipeline.to(dtype=torch.float16)
    pipeline.save_pretrained(checkpoint)
    for file in checkpoint.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)  # saved readable for the owner only


if __name__ == "__main__":
    typer.run(main)
