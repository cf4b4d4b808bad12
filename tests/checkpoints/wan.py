"""Tiny Wans, which draw videos."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import UMT5Config, UMT5EncoderModel

from tests.checkpoints.parts import HIDDEN, raise_gain, scale_weights, tiny_t5_tokenizer

SMALL = {"max_side": 64, "default_num_frames": 5}  # nothing in a checkpoint says how large its videos are
CHANNELS = 16  # of the latents, as in the released models


def save_wan(folder: Path) -> Path:
    """Wan 2.1 with UniPC, as it comes from the hub."""
    return _save(folder, scheduler=_unipc())


def save_wan_euler(folder: Path) -> Path:
    """Wan 2.1 with the solver that the pipeline's signature names."""
    return _save(folder, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0))


def save_wan_two_transformers(folder: Path) -> Path:
    """Wan 2.2 as in its large models: another transformer takes over where little noise is left."""
    return _save(folder, scheduler=_unipc(), transformers=2, boundary_ratio=0.875)


def save_wan_expanded_timesteps(folder: Path) -> Path:
    """Wan 2.2 as in its small model: a timestep for each token, and a VAE that packs squares of two by two pixels."""
    vae = _vae(is_residual=True, in_channels=12, out_channels=12, patch_size=2, scale_factor_spatial=16)
    return _save(folder, scheduler=_unipc(), vae=vae, expand_timesteps=True)


def _save(folder: Path, transformers: int = 1, vae: AutoencoderKLWan | None = None, **parts: Any) -> Path:
    torch.manual_seed(21)
    tokenizer = tiny_t5_tokenizer()
    first, *others = [_transformer() for _ in range(transformers)]
    pipe = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=_umt5(len(tokenizer)),
        vae=vae or _vae(),
        transformer=first,
        transformer_2=others[0] if others else None,
        **parts,
    )
    pipe.save_pretrained(folder)
    (folder / "stepweave.json").write_text(json.dumps(SMALL))
    return folder


def _unipc() -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def _transformer() -> WanTransformer3DModel:
    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=2 * HIDDEN,
        freq_dim=64,
        ffn_dim=96,
        num_layers=2,
    ).eval()
    raise_gain(transformer, 4.0, "text_embedder", "attn2.to_v", "attn2.to_out")
    raise_gain(transformer, 3.0, "time_embedder.linear_2", "time_proj")
    with torch.inference_mode():
        output = transformer(
            hidden_states=torch.randn(8, CHANNELS, 2, 4, 4),
            timestep=torch.linspace(50, 950, 8),
            encoder_hidden_states=torch.randn(8, 40, 2 * HIDDEN),
            return_dict=False,
        )[0]
    scale_weights(transformer.proj_out, 1.0 / output.std())
    return transformer


def _umt5(vocabulary: int) -> UMT5EncoderModel:
    config = UMT5Config(
        vocab_size=vocabulary,
        d_model=2 * HIDDEN,
        d_kv=16,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        tie_word_embeddings=False,
    )
    return UMT5EncoderModel(config).eval()


def _vae(**changes: Any) -> AutoencoderKLWan:
    """Its factors are the real ones, 8 along each side unless changed, and 4 in time."""
    vae = AutoencoderKLWan(base_dim=8, z_dim=CHANNELS, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **changes).eval()
    with torch.inference_mode():
        output = vae.decode(torch.randn(4, CHANNELS, 2, 4, 4)).sample
    scale_weights(vae.decoder.conv_out, 0.4 / output.std())
    return vae
