"""``python -m services.demo.training``: trains the demo checkpoint from nothing, or goes on where it was stopped."""

import json
import re
import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

from services.demo import DEMO_CHECKPOINT
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
    checkpoint: Annotated[Path, typer.Argument(help="The folder to write the finished checkpoint to; it is replaced.")],
    run: Annotated[Path, typer.Option(help="The folder for packages and saved states; go on by giving it again.")],
    steps: Annotated[int, typer.Option(help="Steps of the denoiser.", min=1)] = 11_500,
    seed: Annotated[
        int, typer.Option(help="Two runs with one seed see the same pictures in the same order.", min=0)
    ] = 0,
) -> None:
    """Train the demo checkpoint: autoencoder, text encoders, denoiser."""
    stop_after_saving_on_signals()
    try:
        prepare(checkpoint, run, {"steps": steps, "seed": seed})
        things = load_things(run / "packages")
        book = PictureBook(things, HELD_OUT)
        vae = train_vae(book, run, seed)
        latents = encode(book, vae, run, seed)
        encoders = train_text(things, latents[0], new_tokenizer(words_of(things)), run, seed)
        generator = train_denoiser(things, latents, encoders, run, seed, steps)
        export(generator, vae, checkpoint)
    except KeyboardInterrupt:
        typer.echo(f"Stopped; the same command goes on from the states in {run}.", err=True)
        raise typer.Exit(130) from None
    except (OSError, RuntimeError) as error:  # a folder that can't be written, npm that fails
        typer.echo(f"The training can't go on: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"The checkpoint is in {checkpoint}.", err=True)


def prepare(checkpoint: Path, run: Path, settings: dict[str, int]) -> None:
    """Makes the folders, and sees to it that a run goes on with the settings that it was begun with.

    Raises:
        RuntimeError: the run has other settings, or the folders are no good.
        OSError: they can't be made.
    """
    if checkpoint.resolve() == run.resolve():
        raise RuntimeError("the checkpoint needs a folder of its own, apart from --run")
    if checkpoint.exists() and not (checkpoint / "model_index.json").is_file():
        raise RuntimeError(f"{checkpoint} is there and is no checkpoint; it would be replaced, so name another folder")
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    run.mkdir(parents=True, exist_ok=True)
    file = run / "settings.json"
    if not file.is_file():
        file.write_text(json.dumps(settings))
    begun_with = json.loads(file.read_text())
    if begun_with != settings:
        raise RuntimeError(
            f"the run in {run} was begun with {begun_with}, not {settings}; give it these, or a new --run"
        )


def words_of(things: list[Thing]) -> list[str]:
    """All words of all captions, names thrice as they are said most."""
    said = [*OPENINGS, *COLOURS]
    for thing in things:
        said += [thing.name] * 3 + [*thing.aliases, *thing.tags]
    return re.findall(r"[a-z]+", " ".join(said))


def export(generator: Generator, vae: AutoencoderKL, checkpoint: Path) -> None:
    """Writes a Stable Diffusion 3 pipeline without T5, in half precision, with what is served and said with it."""
    tokenizer = generator.encoders.tokenizer
    vae.register_to_config(_name_or_path="")  # else the folder of the run is in the checkpoint
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
    partial = checkpoint.with_name(f"{checkpoint.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    pipeline.save_pretrained(partial)
    for name in ("stepweave.json", "NOTICE"):
        shutil.copyfile(DEMO_CHECKPOINT / name, partial / name)
    for file in partial.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)  # they were saved readable for the owner only
    if checkpoint.exists():
        shutil.rmtree(checkpoint)
    partial.rename(checkpoint)


if __name__ == "__main__":
    typer.run(main)
