"""Every pipeline through the whole stack: one fleet, a worker for each model, all of them asked at once."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from tests.checkpoints.stable_diffusion import save_sd1, save_sd1_ancestral, save_sd2
from tests.checkpoints.stable_diffusion_3 import save_sd3
from tests.stack import references
from tests.stack.fleet import Fleet, post_all
from tests.worker.driving import LONG

MODELS = {
    "sd1": save_sd1,
    "sd1-ancestral": save_sd1_ancestral,
    "sd2": save_sd2,
    "sd3-t5": lambda folder: save_sd3(folder, t5=True),
}
COMMON = {"prompt": "a red apple on a wooden table", "size": "32x32", "guidance_scale": 5.0, "num_inference_steps": 8}
CROWD: list[dict[str, Any]] = [
    COMMON | {"prompt": "frog", "seed": 11},
    COMMON | {"prompt": LONG, "seed": 12, "num_inference_steps": 11},
    COMMON | {"negative_prompt": "blurry, ugly, watermark", "seed": 13, "num_inference_steps": 5},
    COMMON | {"seed": 14, "guidance_scale": 1.0},
    COMMON | {"seed": 15, "guidance_scale": 2.5, "num_inference_steps": 6},
    COMMON | {"prompt": "blue bicycle", "seed": 16, "guidance_scale": 2.5},
]


async def test_each_picture_of_each_model_is_that_of_diffusers_alone(tmp_path: Path) -> None:
    folders = {name: save(tmp_path / name) for name, save in MODELS.items()}
    with contextlib.ExitStack() as stack:
        fleet = Fleet(tmp_path, stack)
        for name, folder in folders.items():
            fleet.start_worker(name, "--model", str(folder))
        await asyncio.to_thread(fleet.wait_for_workers)
        asked = [body | {"model": name} for body in CROWD for name in MODELS]
        replies = await post_all(fleet, asked)
        for name in MODELS:
            assert max(len(line["requests"]) for line in fleet.steps_of(name)) > 1, f"{name}: nothing was batched"
    pipelines = {name: references.load(folder) for name, folder in folders.items()}
    for body, reply in zip(asked, replies, strict=True):
        references.assert_is_solo(pipelines[body["model"]], body, reply)
