"""The reference: what the diffusers pipeline draws when it is called alone."""

from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from PIL import Image

from common.params import SamplingParams
from services.worker.pipelines.protocol import StepPipeline


def diffusers_pipeline(pipeline: StepPipeline) -> Any:
    """The real diffusers pipeline inside a step pipeline."""
    pipe: Any = pipeline._pipe  # type: ignore[attr-defined]
    pipe.set_progress_bar_config(disable=True)
    return pipe


def in_its_terms(pipeline: StepPipeline, params: SamplingParams) -> SamplingParams:
    """What every family is asked for, as a user of this one would ask it.

    A model that `true_cfg_scale` guides by default gets the guidance there, with a negative prompt, which it needs.
    What a test says of `true_cfg_scale` itself stays.
    """
    profile = pipeline.profile("m", params.num_inference_steps)
    if params.true_cfg_scale is not None or (profile.default_true_cfg_scale or 0.0) <= profile.cfg.threshold:
        return params
    return replace(
        params,
        guidance_scale=profile.default_guidance_scale,
        true_cfg_scale=params.guidance_scale,
        negative_prompt=params.negative_prompt or "",
    )


def draw_solo(pipeline: StepPipeline, params: SamplingParams) -> Image.Image:
    """The picture of one request, by one call of the diffusers pipeline."""
    return draw_solo_frames(pipeline, params)[0]


def draw_solo_frames(pipeline: StepPipeline, params: SamplingParams) -> list[Image.Image]:
    """The frames of one request, of which a picture has one, by one call of the diffusers pipeline."""
    pipe = diffusers_pipeline(pipeline)
    params = in_its_terms(pipeline, params)
    choices = {
        "negative_prompt": params.negative_prompt,  # None is not the default of all of them
        "max_sequence_length": params.max_sequence_length,
        "true_cfg_scale": params.true_cfg_scale,
        "num_frames": params.num_frames if "num_frames" in pipeline.profile("m", 1).accepts else None,
    }
    drawn = pipe(
        params.prompt,
        height=params.height,
        width=params.width,
        num_inference_steps=params.num_inference_steps,
        guidance_scale=params.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(params.seed),
        **{name: value for name, value in choices.items() if value is not None},
        output_type="pil",
    )
    frames: list[Image.Image] = drawn.frames[0] if "frames" in drawn else drawn.images
    return frames


def worst_difference(one: Image.Image, other: Image.Image) -> int:
    """The largest difference of any channel of any pixel, of 255."""
    return int(np.abs(np.asarray(one).astype(int) - np.asarray(other).astype(int)).max())
