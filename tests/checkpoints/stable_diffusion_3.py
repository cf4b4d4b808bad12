"""A tiny Stable Diffusion 3."""

from pathlib import Path

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextModelWithProjection,
)

from tests.checkpoints.parts import (
    HIDDEN,
    raise_gain,
    scale_weights,
    tiny_clip,
    tiny_clip_tokenizer,
    tiny_t5,
    tiny_t5_tokenizer,
    tiny_vae,
)


def save_sd3(folder: Path, *, t5: bool) -> Path:
    """Stable Diffusion 3, with or without its third text encoder."""
    torch.manual_seed(3)
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=2 * HIDDEN,
        caption_projection_dim=32,
        pooled_projection_dim=2 * HIDDEN,
        out_channels=4,
        pos_embed_max_size=16,
    ).eval()
    tokenizer = tiny_clip_tokenizer()
    text_encoder, text_encoder_2 = (tiny_clip(CLIPTextModelWithProjection, tokenizer) for _ in range(2))
    t5_tokenizer = tiny_t5_tokenizer() if t5 else None
    t5_encoder = tiny_t5(t5_tokenizer) if t5 else None
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.5),
        vae=tiny_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer,
        text_encoder_3=t5_encoder,
        tokenizer_3=t5_tokenizer,
    )
    raise_gain(transformer, 3.0, "timestep_embedder.linear_2")
    with torch.inference_mode():
        output = transformer(
            hidden_states=torch.randn(8, 4, 16, 16),
            timestep=torch.linspace(50, 950, 8),
            encoder_hidden_states=torch.randn(8, 40, 2 * HIDDEN),
            pooled_projections=torch.randn(8, 2 * HIDDEN),
            return_dict=False,
        )[0]
    scale_weights(transformer.proj_out, 1.0 / output.std())
    pipe.save_pretrained(folder)
    return folder
