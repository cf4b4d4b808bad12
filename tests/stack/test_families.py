"""Every pipeline through the whole stack: one fleet, a worker for each model, all of them asked at once."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import CHECKPOINTS
from tests.stack import references
from tests.stack.fleet import Fleet, post_all
from tests.worker.driving import LONG

ALWAYS = ("sd1-ancestral", "sd3-t5", "qwen-image", "z-image")  # one of each way to batch; the rest with `--all`
VIDEO = "wan"  # has a test of its own
COMMON = {"prompt": "a red apple on a wooden table", "size": "32x32", "guidance_scale": 5.0, "num_inference_steps": 8}
CROWD: list[dict[str, Any]] = [
    COMMON | {"prompt": "frog", "seed": 11},
    COMMON | {"prompt": LONG, "seed": 12, "num_inference_steps": 11},
    COMMON | {"negative_prompt": "blurry, ugly, watermark", "seed": 13, "num_inference_steps": 5},
    COMMON | {"seed": 14, "guidance_scale": 0.0},
    COMMON | {"seed": 15, "guidance_scale": 2.5, "num_inference_steps": 6, "size": "48x32"},
    COMMON | {"prompt": "blue bicycle", "seed": 16, "guidance_scale": 2.5},
]


def in_its_terms(name: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body as a user of this model would write it."""
    own = body | {"model": name}
    if name == "qwen-image":  # it is guided by another scale, and only with a negative prompt
        scale = own.pop("guidance_scale")
        return {"negative_prompt": ""} | own | {"guidance_scale": 1.0, "true_cfg_scale": scale}
    if name == "flux2-klein":  # the reference's call has no such parameter
        return {field: value for field, value in own.items() if field != "negative_prompt"}
    if name == "pixart":  # the smallest of its class draw 256 pixels a side
        return own | {"size": {"32x32": "256x256", "48x32": "384x256"}[own["size"]]}
    return own


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "names" in metafunc.fixturenames:
        everything = metafunc.config.getoption("all")
        names = tuple(name for name in CHECKPOINTS if name != VIDEO) if everything else ALWAYS
        metafunc.parametrize("names", [names[start : start + 4] for start in range(0, len(names), 4)], ids="+".join)


async def test_each_picture_of_each_model_is_that_of_diffusers_alone(tmp_path: Path, names: tuple[str, ...]) -> None:
    folders = {name: CHECKPOINTS[name](tmp_path / name) for name in names}
    with contextlib.ExitStack() as stack:
        fleet = Fleet(tmp_path, stack)
        for name, folder in folders.items():
            fleet.start_worker(name, "--model", str(folder))
        await asyncio.to_thread(fleet.wait_for_workers)
        asked = [in_its_terms(name, body) for body in CROWD for name in names]
        replies = await post_all(fleet, asked)
        for name in names:
            assert max(len(line["requests"]) for line in fleet.steps_of(name)) > 1, f"{name}: nothing was batched"
    pipelines = {name: references.load(folder) for name, folder in folders.items()}
    for body, reply in zip(asked, replies, strict=True):
        references.assert_is_solo(pipelines[body["model"]], body, reply)
