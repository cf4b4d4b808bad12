"""The training from end to end with a few things and a few steps, interrupted and gone on with."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer

from bench.demo import load_pipeline
from services.demo.training import __main__ as program
from services.demo.training import denoiser, latents, saving, text, vae
from tests.demo.packages import write_packages

STEPS = 5


@pytest.fixture(scope="module", autouse=True)
def little_work() -> Iterator[None]:
    sizes = tuple(replace(size, count=160, share=0.5, batch=4) for size in latents.SIZES[:2])
    constants = {
        latents: {"SIZES": sizes},
        denoiser: {"SIZES": sizes},
        vae: {"STEPS": 3, "BATCH": 4},
        text: {"STEPS": 3},
    }
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        for module, values in constants.items():
            for name, value in values.items():
                patch.setattr(module, name, value)
        yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nobody interrupted; its checkpoint is in it."""
    run = tmp_path_factory.mktemp("whole")
    write_packages(run / "packages")
    program.main(run / "checkpoint", run, steps=STEPS, seed=0)
    return run


def test_trains_a_checkpoint_that_the_pipeline_loads_and_draws_with(whole: Path, tmp_path: Path) -> None:
    pipeline = load_pipeline(whole / "checkpoint")
    picture = pipeline("frog", width=64, height=48, num_inference_steps=2, output_type="np").images[0]
    assert picture.shape == (48, 64, 3)
    assert np.isfinite(picture).all()
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in (whole / "checkpoint").rglob("*"))
    assert {"stepweave.json", "NOTICE"} <= {file.name for file in (whole / "checkpoint").iterdir()}
    assert not [file for file in (whole / "checkpoint").rglob("*.json") if str(whole) in file.read_text()]
    # A finished run has nothing left to do: the same command writes the same weights.
    program.main(tmp_path / "again", whole, steps=STEPS, seed=0)
    assert_same_weights(whole / "checkpoint", tmp_path / "again")


def test_a_run_goes_on_only_with_its_own_settings(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for other in ({"steps": STEPS + 1, "seed": 0}, {"steps": STEPS, "seed": 1}):
        with pytest.raises(typer.Exit) as ended:
            program.main(tmp_path / "checkpoint", whole, **other)
        assert ended.value.exit_code == 1
        assert "was begun with {'steps': 5, 'seed': 0}" in capsys.readouterr().err
    assert not (tmp_path / "checkpoint").exists()


def test_a_folder_that_is_no_checkpoint_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter.txt").write_text("dear")
    for checkpoint, run in ((mine, tmp_path / "run"), (tmp_path / "run", tmp_path / "run")):
        with pytest.raises(typer.Exit):
            program.main(checkpoint, run, steps=STEPS, seed=0)
    said = capsys.readouterr().err
    assert "is there and is no checkpoint" in said
    assert "a folder of its own" in said
    assert (mine / "letter.txt").read_text() == "dear"


def assert_same_weights(checkpoint: Path, other: Path) -> None:
    files = list(checkpoint.rglob("*.safetensors"))
    assert files
    for file in files:
        same = (other / file.relative_to(checkpoint)).read_bytes() == file.read_bytes()
        assert same, f"{file.name} of the {file.parent.name} differs"


STAGES = {
    "autoencoder": (vae, "as_input", 2),
    "encoding": (latents, "as_input", 2),
    "text encoders": (text, "caption", 2 * text.BATCH),
    "denoiser": (denoiser, "_loss", 2),
}


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_stage_goes_on_as_if_it_had_not_been(
    stage: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, checkpoint = tmp_path / "run", tmp_path / "checkpoint"
    write_packages(run / "packages")
    module, function, call = STAGES[stage]
    original, calls = getattr(module, function), 0

    def interrupted(*args):
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)

    monkeypatch.setattr(module, function, interrupted)
    with pytest.raises(typer.Exit) as ended:
        program.main(checkpoint, run, steps=STEPS, seed=0)
    assert ended.value.exit_code == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert not checkpoint.exists()
    saving._asked_to_stop.clear()  # a new process would start with it cleared
    program.main(checkpoint, run, steps=STEPS, seed=0)
    assert_same_weights(whole / "checkpoint", checkpoint)
