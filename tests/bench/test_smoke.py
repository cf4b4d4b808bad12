"""The commands that need a model, each for a moment: they run, and write figures that make sense."""

import base64
import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bench.asking import MAX_STEPS, sampling_params
from bench.bare_loop import BareLoop
from bench.demo import draw, load_pipeline
from bench.whole_pictures import draw as draw_whole
from bench.whole_pictures import load, reply
from bench.workload import PROMPTS, Shape, call_seed
from services.demo import DEMO_CHECKPOINT
from services.worker.loader import load_pipeline as load_step_pipeline

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 300.0


def figures(tmp_path: Path, command: str, *arguments: str) -> Any:
    """What `python -m bench.COMMAND --json` writes."""
    file = tmp_path / f"{command}.json"
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{command}", *arguments, "--json", str(file)],
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


def test_limit(tmp_path: Path) -> None:
    limits = figures(tmp_path, "limit", "--batches", "1,4", "--rounds", "2", "--shape", "64x64/2", "--threads", "1")
    assert [limit["batch_size"] for limit in limits] == [1, 4]
    assert all(limit["images_s"]["median"] > 0 and len(limit["seconds"]["values"]) == 2 for limit in limits)


def test_solver_step(tmp_path: Path) -> None:
    flags = ["--requests", "1,4", "--rounds", "1", "--latents", "4x4x4", "--threads", "1", "--dtype", "bfloat16"]
    rows = figures(tmp_path, "solver_step", *flags)
    assert [row["requests"] for row in rows] == [1, 4] * 3
    assert all(0 < row["together"]["median"] < 1 and row["gain"]["median"] > 0 for row in rows)


def test_the_bare_loop_draws_what_the_pipeline_draws_alone() -> None:
    pipeline = load_step_pipeline(str(DEMO_CHECKPOINT), "cpu", "float32")
    params = sampling_params(pipeline.profile("demo", MAX_STEPS), Shape(64, 64, 3))
    with torch.inference_mode():
        files = BareLoop(pipeline, params, threads=1).draw(2)
    for number, file in enumerate(files):
        alone = draw(load_pipeline(), [PROMPTS[number]], seed=call_seed(0, number), steps=3)[0]
        assert np.abs(np.asarray(Image.open(io.BytesIO(file))).astype(int) - alone.astype(int)).max() <= 1


def test_mixing(tmp_path: Path) -> None:
    written = [sys.executable, "-m", "tests.checkpoints", str(tmp_path), "flux"]
    subprocess.run(written, check=True, capture_output=True, timeout=DEADLINE_S, cwd=ROOT)
    flags = ["--checkpoint", str(tmp_path / "flux"), "--shapes", "32x32/2,24x32/2,16x32/1", "--requests", "6"]
    results = figures(tmp_path, "mixing", *flags, "--rounds", "2", "--threads", "1")
    apart = {"guidance": (6, 12), "cfg": (2, 4), "sizes": (3, 5), "everything": (6, 10)}
    for name, (groups, forwards) in apart.items():
        mixed, *others = (each for each in results if each["load"] == name)
        assert [(each["way"], each["groups"], each["forwards"]) for each in others] == [
            ("in turns", groups, forwards),
            ("one by one", groups, forwards),
        ]
        assert (mixed["way"], mixed["groups"]) == ("mixed", 1)
        # Which sizes share a forward depends on what a step was measured to cost here.
        assert 2 <= mixed["forwards"] <= (5 if name in ("sizes", "everything") else 2)
    for each in results:
        assert each["padding"] == 0 or (each["way"] == "mixed" and each["load"] in ("sizes", "everything"))
        assert all(seconds > 0 for seconds in each["seconds"]["values"])
        assert len(each["times_mixed"]["values"]) == 2


def test_overhead_with_a_dummy_model(tmp_path: Path) -> None:
    flags = ["--rounds", "1", "--calls", "40", "--requests", "500"]
    idle, refusal, memory = (
        row["figures"] for row in figures(tmp_path, "overhead", "idle", "refusal", "memory", *flags)
    )
    for of in idle.values():
        assert 0 < of["p50"]["median"] < of["p99"]["median"] < 1
    assert all(10 < megabytes < 500 for megabytes in memory["at_rest_mb"].values())
    assert (memory["requests"], memory["still_held"]) == (500, 0)
    assert 0 < refusal["p50"]["median"] < 1


def test_overhead_with_a_real_model(tmp_path: Path) -> None:
    flags = ["--rounds", "1", "--images", "8", "--shape", "64x64/8"]
    rows = figures(tmp_path, "overhead", "saturation", "lost-worker", *flags)
    saturation, lost = (row["figures"] for row in rows)
    assert 0 < saturation["ratio"]["median"] < 2
    assert lost["outcomes"] == {"completed": 16}
    assert lost["steps_done_twice"]["most"] <= 8


def test_compare(tmp_path: Path) -> None:
    systems = ["stepweave", "lock", "litserve"] if importlib.util.find_spec("litserve") else ["stepweave", "lock"]
    flags = ["--clients", "4", "--calls", "8", "--rounds", "1", "--shapes", "64x64/2", "--threads", "1"]
    compared = figures(tmp_path, "compare", *systems, *flags)
    assert [each["system"] for each in compared] == systems
    for each in compared:
        assert each["failed"] == 0
        assert each["images_s"]["median"] > 0
        assert each["p95_s"]["median"] > 0


def test_whole_pictures_are_those_of_the_pipeline_called_alone() -> None:
    pipeline = load(DEMO_CHECKPOINT, 1)
    asked = {"prompt": "frog", "size": "64x64", "num_inference_steps": 3, "guidance_scale": 4.0, "seed": 5, "n": 1}
    other = asked | {"num_inference_steps": 2, "prompt": "house"}
    pictures = draw_whole(pipeline, [asked, other, asked | {"seed": 9, "n": 2}])
    assert [len(of) for of in pictures] == [1, 1, 2]
    file = reply(pictures[0])["data"][0]["b64_json"]
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(file))))
    alone = draw(pipeline, ["frog"], seed=5, steps=3)[0]
    assert np.abs(picture.astype(int) - alone.astype(int)).max() <= 1
