"""Every pipeline through the whole stack: one fleet, a worker for each model, all of them asked at once."""

import asyncio
import base64
import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from services.worker.image import read_metadata
from services.worker.video import read_video_metadata
from tests.checkpoints import CHECKPOINTS
from tests.stack import references
from tests.stack.fleet import Fleet, post_all
from tests.worker.driving import LONG

ALWAYS = ("sd1-ancestral", "sd3-t5", "qwen-image", "z-image")  # one of each way to batch; the rest with `--all`
SOLVER = "FlowMatchEulerDiscreteScheduler"
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


async def test_what_a_file_says_of_itself_makes_the_same_picture_again(tmp_path: Path) -> None:
    asked = [
        {"model": "z-image", "prompt": "frog", "size": "48x32", "seed": 3, "num_inference_steps": 4},
        {"model": "z-image", "prompt": "un café 🍎", "scheduler": {"name": SOLVER, "options": {"shift": 2}}, "seed": 4},
        {"model": "z-image", "prompt": "frog", "sigmas": [1.0, 0.7, 0.2], "negative_prompt": "dog", "size": "32x32"},
        {"model": VIDEO, "prompt": "frog", "num_frames": 1, "size": "32x32", "num_inference_steps": 3},
        {"model": VIDEO, "prompt": "frog", "num_frames": 5, "size": "32x32", "num_inference_steps": 3},
    ]
    with contextlib.ExitStack() as stack:
        fleet = Fleet(tmp_path, stack)
        for name in ("z-image", VIDEO):
            fleet.start_worker(name, "--model", str(CHECKPOINTS[name](tmp_path / name)))
        await asyncio.to_thread(fleet.wait_for_workers)
        first = [base64.b64decode(reply["data"][0]["b64_json"]) for _, reply in await post_all(fleet, asked)]
        told = [
            read_video_metadata(file) if body["num_frames"] > 1 else read_metadata(file)
            for body, file in zip([{"num_frames": 1} | body for body in asked], first, strict=True)
        ]
        replies = await post_all(fleet, told)
    for body, file, (status, reply) in zip(told, first, replies, strict=True):
        assert (status, reply.get("warnings")) == (200, []), reply
        again = base64.b64decode(reply["data"][0]["b64_json"])
        if body["num_frames"] > 1:
            assert again == file  # equal frames make equal bytes
        else:
            assert references.largest_difference(*(Image.open(io.BytesIO(each)) for each in (file, again))) <= 1
