"""Tiny FLUX.1 checkpoints: guidance as an input of the transformer (dev), and without (schnell)."""

from pathlib import Path

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from transformers import (
    CLIPTextModel,
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


def save_flux_dev(folder: Path) -> Path:
    """FLUX.1-dev: distilled guidance is embedded, and the schedule is shifted by the picture's size."""
    return _save_flux(folder, FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), guidance_embeds=True)


def save_flux_schnell(folder: Path) -> Path:
    """FLUX.1-schnell: no guidance, and the same schedule at every size."""
    return _save_flux(folder, FlowMatchEulerDiscreteScheduler(shift=1.0), guidance_embeds=False)


def _save_flux(folder: Path, scheduler: FlowMatchEulerDiscreteScheduler, *, guidance_embeds: bool) -> Path:
    torch.manual_seed(11)
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=2 * HIDDEN,
        pooled_projection_dim=HIDDEN,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    ).eval()
    tokenizer = tiny_clip_tokenizer()
    t5_tokenizer = tiny_t5_tokenizer()
    t5_encoder = tiny_t5(t5_tokenizer)
    vae = tiny_vae()
    scale_weights(vae.decoder.conv_out, 0.75)
    vae.register_to_config(scaling_factor=1.25, shift_factor=0.1)
    raise_gain(transformer, 3.0, "embedder.linear_2", "norm1", "add_v_proj")
    raise_gain(transformer, 2.0, "norm_q", "norm_k", "norm_added")  # places matter, and yet no key counts alone
    with torch.no_grad():
        # Else 500 equal padding tokens drown the prompt. So each of them says what it has seen of it.
        t5_encoder.shared.weight[t5_tokenizer.pad_token_id] = 0.0
    with torch.inference_mode():
        output = transformer(
            hidden_states=torch.randn(8, 64, 16),
            timestep=torch.linspace(0.05, 0.95, 8),
            guidance=torch.linspace(1.0, 7.0, 8) if guidance_embeds else None,
            encoder_hidden_states=torch.randn(8, 64, 2 * HIDDEN),
            pooled_projections=torch.randn(8, HIDDEN),
            txt_ids=torch.zeros(64, 3),
            img_ids=torch.cartesian_prod(torch.zeros(1), torch.arange(8.0), torch.arange(8.0)),
            return_dict=False,
        )[0]
    scale_weights(transformer.proj_out, 1.0 / output.std())
    pipe = FluxPipeline(
        transformer=transformer,
        scheduler=scheduler,
        vae=vae,
        text_encoder=tiny_clip(CLIPTextModel, tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=t5_encoder,
        tokenizer_2=t5_tokenizer,
    )
    pipe.save_pretrained(folder)
    return folder
