"""The training from end to end with a few things and a few steps, interrupted and gone on with."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from services.demo.training import __main__ as program
from services.demo.training import denoiser, latents, saving, text, vae
from tests.demo.packages import write_packages

STEPS = 5


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    sizes = tuple(replace(size, count=40, share=0.5, batch=4) for size in latents.SIZES[:2])
    monkeypatch.setattr(latents, "SIZES", sizes)
    monkeypatch.setattr(denoiser, "SIZES", sizes)
    monkeypatch.setattr(vae, "STEPS", 3)
    monkeypatch.setattr(vae, "BATCH", 4)
    monkeypatch.setattr(text, "STEPS", 3)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    saving._asked_to_stop.clear()


def test_trains_a_checkpoint_that_the_pipeline_loads_and_draws_with(tmp_path: Path) -> None:
    write_packages(tmp_path / "run" / "packages")
    program.main(tmp_path / "checkpoint", tmp_path / "run", steps=STEPS, seed=0)
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        tmp_path / "checkpoint", text_encoder_3=None, tokenizer_3=None, dtype=torch.float32
    )
    picture = pipeline("frog", width=64, height=48, num_inference_steps=2, output_type="np").images[0]
    assert picture.shape == (48, 64, 3)
    assert np.isfinite(picture).all()
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in (tmp_path / "checkpoint").rglob("*"))
    # A finished run has nothing left to do: the same command writes the same weights.
    program.main(tmp_path / "again", tmp_path / "run", steps=STEPS, seed=0)
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert (tmp_path / "again" / weights).read_bytes() == (tmp_path / "checkpoint" / weights).read_bytes()


STAGES = {
    "autoencoder": (vae, "as_input", 2),
    "text encoders": (text, "caption", 2 * text.BATCH),
    "denoiser": (denoiser, "_loss", 2),
}


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_stage_goes_on_as_if_it_had_not_been(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("whole", "parts"):
        write_packages(tmp_path / name / "packages")
    program.main(tmp_path / "from-whole", tmp_path / "whole", steps=STEPS, seed=3)
    module, function, call = STAGES[stage]
    original, calls = getattr(module, function), 0

    def interrupted(*args):
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)

    monkeypatch.setattr(module, function, interrupted)
    with pytest.raises(program.typer.Exit) as ended:
        program.main(tmp_path / "from-parts", tmp_path / "parts", steps=STEPS, seed=3)
    assert ended.value.exit_code == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert not (tmp_path / "from-parts").exists()
    saving._asked_to_stop.clear()  # a new process would start with it cleared
    program.main(tmp_path / "from-parts", tmp_path / "parts", steps=STEPS, seed=3)
    for file in (tmp_path / "from-whole").rglob("*.safetensors"):
        other = tmp_path / "from-parts" / file.relative_to(tmp_path / "from-whole")
        assert other.read_bytes() == file.read_bytes(), f"{file.name} of the {file.parent.name} differs"
