"""The same pictures by diffusers alone: what a stack's replies are compared with."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image

from bench.demo import load_pipeline

torch.set_num_threads(1)  # the stack under test has the other core


def load_demo() -> diffusers.DiffusionPipeline:
    return load_pipeline()


def load(folder: Path) -> diffusers.DiffusionPipeline:
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    # Components that the index leaves empty must be named, or diffusers reports them as missing.
    absent = {name: None for name, value in index.items() if isinstance(value, list) and value[0] is None}
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.float32, **absent)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def solo(pipeline: diffusers.DiffusionPipeline, body: dict[str, Any]) -> Image.Image:
    """The picture that a body of the images API asks for, every parameter given."""
    width, height = (int(side) for side in body["size"].split("x"))
    optional = ("negative_prompt", "true_cfg_scale", "max_sequence_length")
    return pipeline(
        prompt=body["prompt"],
        width=width,
        height=height,
        num_inference_steps=body["num_inference_steps"],
        guidance_scale=body["guidance_scale"],
        **{name: body[name] for name in optional if name in body},
        generator=torch.Generator("cpu").manual_seed(body["seed"]),
    ).images[0]


def decoded(b64_json: str) -> Image.Image:
    picture = Image.open(io.BytesIO(base64.b64decode(b64_json)))
    picture.load()
    return picture


def largest_difference(one: Image.Image, other: Image.Image) -> int:
    """Of any pixel and channel, 0 to 255."""
    assert one.size == other.size
    a, b = (np.asarray(picture.convert("RGB"), dtype=np.int16) for picture in (one, other))
    return int(np.abs(a - b).max())


def assert_is_solo(pipeline: diffusers.DiffusionPipeline, asked: dict[str, Any], reply: tuple[int, Any]) -> None:
    """The reply (status and JSON) to a body of one picture is what diffusers alone draws for it."""
    status, answer = reply
    assert status == 200, answer
    picture = decoded(answer["data"][0]["b64_json"])
    assert largest_difference(picture, solo(pipeline, asked)) <= 1, asked
