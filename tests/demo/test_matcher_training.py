"""The matcher's training, interrupted and gone on with."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import typer

from bench.matcher import train as program
from bench.matcher.drawings import UNKNOWN, Drawings
from bench.matcher.model import COLOUR_WORDS, SIZE, Matcher
from services.demo.training import saving

STEPS = 3


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    random = np.random.default_rng(0)
    pictures = random.integers(256, size=(12, SIZE, SIZE, 3), dtype=np.uint8)
    nouns, colours = random.integers(2, size=12), random.integers(UNKNOWN, len(COLOUR_WORDS), size=12)
    monkeypatch.setattr(program, "load_things", lambda folder: [])
    monkeypatch.setattr(
        program, "load_drawings", lambda things, folder: Drawings(("frog", "star"), pictures, nouns, colours, plain=6)
    )
    monkeypatch.setattr(program, "BATCH", 6)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The weights that the program writes when it runs to its end."""
    save, weights = Matcher.save, folder.with_suffix(".safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(Matcher, "save", lambda matcher: save(matcher, weights))  # not beside the program
        program.main(folder, total=STEPS, seed=0)
    return weights.read_bytes()


def test_an_interrupted_training_goes_on_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trained(tmp_path / "whole", monkeypatch)
    distort, calls = program.distort, 0

    def interrupted(*args, **options):
        nonlocal calls
        calls += 1
        if calls == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return distort(*args, **options)

    monkeypatch.setattr(program, "distort", interrupted)
    with pytest.raises(typer.Exit) as ended:
        trained(tmp_path / "run", monkeypatch)
    assert ended.value.exit_code == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert not (tmp_path / "run.safetensors").exists()
    saving._asked_to_stop.clear()  # a new process would start with it cleared
    assert trained(tmp_path / "run", monkeypatch) == whole
    assert calls == STEPS, "the steps before the interruption were kept"
