"""A tiny PixArt-Sigma."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    DDIMScheduler,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
)

from tests.checkpoints.parts import (
    HIDDEN,
    raise_gain,
    tiny_t5,
    tiny_t5_tokenizer,
    tiny_vae,
)


def save_pixart(folder: Path, **changes: Any) -> Path:
    """PixArt-Sigma: a T5 encoder whose padding is masked, DDIM. Whatever is asked for, it draws 256 pixels a side or
    another shape of that area. `changes` are of its transformer."""
    torch.manual_seed(7)
    transformer = PixArtTransformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        cross_attention_dim=32,
        caption_channels=2 * HIDDEN,
        use_additional_conditions=False,
        **{"out_channels": 8, **changes},
    ).eval()
    with torch.no_grad():
        for parameter in transformer.parameters():
            if float(parameter.std()) == 0.0:  # what is trained up from zero
                parameter.normal_(std=0.1)
    raise_gain(transformer, 2.0, "attn2.to_v", "attn2.to_out")
    tokenizer = tiny_t5_tokenizer()
    pipe = PixArtSigmaPipeline(
        tokenizer=tokenizer,
        text_encoder=tiny_t5(tokenizer),
        vae=tiny_vae(halvings=3),
        transformer=transformer,
        scheduler=DDIMScheduler(beta_start=0.0001, beta_end=0.02, clip_sample=False, set_alpha_to_one=False),
    )
    pipe.save_pretrained(folder)
    return folder
