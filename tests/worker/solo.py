"""The reference: what the diffusers pipeline draws when it is called alone."""

from typing import Any

import numpy as np
import torch
from PIL import Image

from common.params import SamplingParams
from services.worker.pipelines.protocol import StepPipeline


def diffusers_pipeline(pipeline: StepPipeline) -> Any:
    """The real diffusers pipeline inside a step pipeline."""
    pipe: Any = pipeline._pipe  # type: ignore[attr-defined]
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw_solo(pipeline: StepPipeline, params: SamplingParams) -> Image.Image:
    """The picture of one request, by one call of the diffusers pipeline."""
    pipe = diffusers_pipeline(pipeline)
    asked = params.max_sequence_length
    text_length = {} if asked is None else {"max_sequence_length": asked}
    image: Image.Image = pipe(
        params.prompt,
        height=params.height,
        width=params.width,
        num_inference_steps=params.num_inference_steps,
        guidance_scale=params.guidance_scale,
        negative_prompt=params.negative_prompt,
        generator=torch.Generator("cpu").manual_seed(params.seed),
        **text_length,
    ).images[0]
    return image


def worst_difference(one: Image.Image, other: Image.Image) -> int:
    """The largest difference of any channel of any pixel, of 255."""
    return int(np.abs(np.asarray(one).astype(int) - np.asarray(other).astype(int)).max())
