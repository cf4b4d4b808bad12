"""A tiny Stable Diffusion XL."""

from pathlib import Path

import torch
from diffusers import (
    EulerDiscreteScheduler,
    StableDiffusionXLPipeline,
)
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
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


def save_sdxl(folder: Path) -> Path:
    """Stable Diffusion XL: two CLIP encoders, sizes as conditions."""
    torch.manual_seed(5)
    tokenizer = tiny_clip_tokenizer()
    unet = tiny_unet(
        cross_attention_dim=2 * HIDDEN,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + HIDDEN,
    )
    raise_gain(unet, 4.0, "attn2.to_v", "attn2.to_out", "time_embedding.linear_2")
    with torch.inference_mode():
        conditions = {"text_embeds": torch.randn(8, HIDDEN), "time_ids": torch.full((8, 6), 32.0)}
        embeds = torch.randn(8, CLIP_TOKENS, 2 * HIDDEN)
        noise, times = torch.randn(8, 4, 16, 16), torch.linspace(50, 950, 8)
        output = unet(noise, times, embeds, added_cond_kwargs=conditions).sample
    scale_weights(unet.conv_out, 1.0 / output.std())
    pipe = StableDiffusionXLPipeline(
        vae=tiny_vae(),
        text_encoder=tiny_clip(CLIPTextModel, tokenizer),
        text_encoder_2=tiny_clip(CLIPTextModelWithProjection, tokenizer),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=unet,
        # As it comes from the hub. So spaced, the first sigma, which scales the noise, depends on the number of steps.
        scheduler=EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            steps_offset=1,
            timestep_spacing="leading",
        ),
        add_watermarker=False,
    )
    pipe.save_pretrained(folder)
    return folder
