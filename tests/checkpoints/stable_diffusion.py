"""Tiny checkpoints around the UNet of Stable Diffusion 1.x and 2.x."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    DDIMScheduler,
    EulerAncestralDiscreteScheduler,
    LatentConsistencyModelPipeline,
    LCMScheduler,
    PNDMScheduler,
    StableDiffusionPipeline,
)
from transformers import (
    CLIPTextModel,
)

from tests.checkpoints.parts import (
    CLIP_TOKENS,
    HIDDEN,
    raise_gain,
    scale_weights,
    tiny_clip,
    tiny_clip_tokenizer,
    tiny_unet,
    tiny_vae,
)


def save_sd1(folder: Path) -> Path:
    """Stable Diffusion 1.x with PNDM, as it comes from the hub."""
    scheduler = PNDMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True, steps_offset=1
    )
    return _save_sd(folder, scheduler)


def save_sd2(folder: Path) -> Path:
    """Stable Diffusion 2.x: the UNet predicts velocity, DDIM solves."""
    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    return _save_sd(folder, scheduler)


def save_sd1_ancestral(folder: Path) -> Path:
    """Stable Diffusion 1.x with a solver that scales the model's input and draws noise at every step."""
    scheduler = EulerAncestralDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
    )
    return _save_sd(folder, scheduler)


def save_lcm(folder: Path) -> Path:
    """A latent consistency model: guidance is an input of the UNet, and the solver draws noise at every step."""
    scheduler = LCMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False)
    return _save_sd(folder, scheduler, LatentConsistencyModelPipeline, time_cond_proj_dim=32)


def _save_sd(folder: Path, scheduler: Any, kind: Any = StableDiffusionPipeline, **changes: Any) -> Path:
    torch.manual_seed(1)
    unet = tiny_unet(**changes)
    tokenizer = tiny_clip_tokenizer()
    text_encoder = tiny_clip(CLIPTextModel, tokenizer)
    raise_gain(unet, 4.0, "attn2.to_v", "attn2.to_out")
    with torch.inference_mode():
        output = unet(torch.randn(8, 4, 16, 16), torch.linspace(50, 950, 8), torch.randn(8, CLIP_TOKENS, HIDDEN)).sample
    scale_weights(unet.conv_out, 1.0 / output.std())
    pipe = kind(
        vae=tiny_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.save_pretrained(folder)
    return folder
