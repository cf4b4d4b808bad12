"""Whole pictures from a diffusers pipeline, as the servers that Stepweave is compared with draw them.

Role: API bodies to pipeline calls to base64 PNG, as Stepweave writes it: with Pillow at its own compression. Those that
a pipeline can draw in one batch are drawn in one.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.demo import MAX_SEQUENCE_LENGTH, load_pipeline

Body = Mapping[str, Any]


def load(checkpoint: Path, threads: int) -> Any:
    """The diffusers pipeline, warm, in a process that gives torch so many threads."""
    torch.set_num_threads(threads)
    pipeline = load_pipeline(checkpoint)
    warm = {"prompt": "red apple", "size": "64x64", "num_inference_steps": 2, "guidance_scale": 4.0, "seed": 0, "n": 1}
    draw(pipeline, [warm])
    return pipeline


def draw(pipeline: Any, bodies: Sequence[Body]) -> list[list[Any]]:
    """The pictures of each call. A pipeline call has one size, one number of steps and one guidance: calls that differ
    in these are drawn one group after another."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, body in enumerate(bodies):
        key = (body["size"], body["num_inference_steps"], body["guidance_scale"])
        groups.setdefault(key, []).append(index)
    pictures: list[list[Any]] = [[] for _ in bodies]
    for (size, steps, guidance_scale), members in groups.items():
        owners = [index for index in members for _ in range(bodies[index]["n"])]
        seeds = [bodies[index]["seed"] + number for index in members for number in range(bodies[index]["n"])]
        width, height = map(int, size.split("x"))
        images = pipeline(
            [bodies[index]["prompt"] for index in owners],
            width=width,
            height=height,
            num_inference_steps=steps,
            guidance_scale=guidance_scale,
            max_sequence_length=MAX_SEQUENCE_LENGTH,
            generator=[torch.Generator("cpu").manual_seed(seed) for seed in seeds],
        ).images
        for index, image in zip(owners, images, strict=True):
            pictures[index].append(image)
    return pictures


def reply(pictures: Sequence[Any]) -> dict[str, Any]:
    """The images API's to one call, as far as the bench's client looks."""
    return {"data": [{"b64_json": _png(picture)} for picture in pictures]}


def _png(image: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()
