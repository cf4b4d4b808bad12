"""The demo checkpoint drawn with diffusers alone, as its measurements need it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline

from services.demo import DEMO_CHECKPOINT

BATCH = 16
MAX_SEQUENCE_LENGTH = 20  # as the checkpoint's stepweave.json says


def load_pipeline(checkpoint: Path = DEMO_CHECKPOINT) -> StableDiffusion3Pipeline:
    """The pipeline as a worker loads it on a CPU, in float32."""
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        checkpoint, text_encoder_3=None, tokenizer_3=None, dtype=torch.float32
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(
    pipeline: StableDiffusion3Pipeline,
    prompts: Sequence[str],
    seed: int,
    steps: int = 20,
    guidance_scale: float = 4.0,
    width: int = 64,
    height: int = 64,
    max_sequence_length: int = MAX_SEQUENCE_LENGTH,
) -> np.ndarray:
    """One picture a prompt, each from a generator of its own seeded with ``seed``: RGB uint8 (N, height, width, 3)."""
    pictures = []
    for start in range(0, len(prompts), BATCH):
        batch = list(prompts[start : start + BATCH])
        pictures += pipeline(
            batch,
            width=width,
            height=height,
            num_inference_steps=steps,
            guidance_scale=guidance_scale,
            max_sequence_length=max_sequence_length,
            generator=[torch.Generator("cpu").manual_seed(seed) for _ in batch],
        ).images
    return np.stack([np.asarray(picture) for picture in pictures])
