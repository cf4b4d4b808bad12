"""Tiny checkpoints of the real classes, built from a seed and written with `save_pretrained`.

Random weights answer to nothing: the text hardly reaches the picture. So the gains on the text path are raised and each
output is scaled to the size that trained models have, until a checkpoint is *sensitive* (another prompt, seed, step
count or guidance moves the picture a lot) and still *well conditioned* (a rounding error does not). `test_checkpoints`
measures both.
"""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    LatentConsistencyModelPipeline,
    LCMScheduler,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    PNDMScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from tokenizers import pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

CORPUS = [
    "a red apple on a wooden table",
    "a green frog under a purple umbrella",
    "blue bicycle beside the old house in the rain",
    "yellow school bus, cat with sunglasses, dog on a skateboard",
    "an oil painting of mountains and a lake at night",
    "low quality, blurry, ugly, watermark",
]
CLIP_TOKENS = 24  # model_max_length
HIDDEN = 32  # width of every text encoder


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
    tokenizer = clip_tokenizer()
    text_encoder, text_encoder_2 = (_clip(CLIPTextModelWithProjection, tokenizer) for _ in range(2))
    t5_tokenizer = _t5_tokenizer() if t5 else None
    t5_encoder = _t5(t5_tokenizer) if t5 else None
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.5),
        vae=_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer,
        text_encoder_3=t5_encoder,
        tokenizer_3=t5_tokenizer,
    )
    _raise(transformer, 3.0, "timestep_embedder.linear_2")
    with torch.inference_mode():
        output = transformer(
            hidden_states=torch.randn(8, 4, 16, 16),
            timestep=torch.linspace(50, 950, 8),
            encoder_hidden_states=torch.randn(8, 40, 2 * HIDDEN),
            pooled_projections=torch.randn(8, 2 * HIDDEN),
            return_dict=False,
        )[0]
    _scale(transformer.proj_out, 1.0 / output.std())
    pipe.save_pretrained(folder)
    return folder


def save_sdxl(folder: Path) -> Path:
    """Stable Diffusion XL: two CLIP encoders, sizes as conditions."""
    torch.manual_seed(5)
    tokenizer = clip_tokenizer()
    unet = _unet(
        cross_attention_dim=2 * HIDDEN,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + HIDDEN,
    )
    _raise(unet, 4.0, "attn2.to_v", "attn2.to_out")
    with torch.inference_mode():
        conditions = {"text_embeds": torch.randn(8, HIDDEN), "time_ids": torch.full((8, 6), 32.0)}
        embeds = torch.randn(8, CLIP_TOKENS, 2 * HIDDEN)
        noise, times = torch.randn(8, 4, 16, 16), torch.linspace(50, 950, 8)
        output = unet(noise, times, embeds, added_cond_kwargs=conditions).sample
    _scale(unet.conv_out, 1.0 / output.std())
    pipe = StableDiffusionXLPipeline(
        vae=_vae(),
        text_encoder=_clip(CLIPTextModel, tokenizer),
        text_encoder_2=_clip(CLIPTextModelWithProjection, tokenizer),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=unet,
        scheduler=EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
        ),
        add_watermarker=False,
    )
    pipe.save_pretrained(folder)
    return folder


def save_pixart(folder: Path) -> Path:
    """PixArt-Sigma: a T5 encoder whose padding is masked, DDIM. Its class knows pictures of 256 pixels and up."""
    torch.manual_seed(7)
    transformer = PixArtTransformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        cross_attention_dim=32,
        caption_channels=2 * HIDDEN,
        use_additional_conditions=False,
    ).eval()
    with torch.no_grad():
        for parameter in transformer.parameters():
            if float(parameter.std()) == 0.0:  # what is trained up from zero
                parameter.normal_(std=0.1)
    tokenizer = _t5_tokenizer()
    pipe = PixArtSigmaPipeline(
        tokenizer=tokenizer,
        text_encoder=_t5(tokenizer),
        vae=_vae(halvings=3),
        transformer=transformer,
        scheduler=DDIMScheduler(beta_start=0.0001, beta_end=0.02, clip_sample=False, set_alpha_to_one=False),
    )
    pipe.save_pretrained(folder)
    return folder


def save_lcm(folder: Path) -> Path:
    """A latent consistency model: guidance is an input of the UNet, and the solver draws noise at every step."""
    scheduler = LCMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False)
    return _save_sd(folder, scheduler, LatentConsistencyModelPipeline, time_cond_proj_dim=32)


def clip_tokenizer() -> CLIPTokenizer:
    """A byte-level BPE tokenizer whose merges spell the corpus's words from left to right.

    Not learnt by counting: the trainer of `tokenizers` breaks ties by chance, and each run would get other weights.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|startoftext|>", "<|endoftext|>", *alphabet, *(f"{letter}</w>" for letter in alphabet)]
    merges: dict[tuple[str, str], str] = {}
    for word in sorted({word.strip(",") for line in CORPUS for word in line.split()}):
        start, *rest = [*word[:-1], f"{word[-1]}</w>"]
        for part in rest:
            merges.setdefault((start, part), start + part)
            start += part
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*tokens, *merges.values()]))}
    return CLIPTokenizer(vocab=vocab, merges=list(merges), model_max_length=CLIP_TOKENS)


def _t5_tokenizer() -> T5Tokenizer:
    pieces = sorted({piece for line in CORPUS for word in line.split() for piece in (f"▁{word}", *word)})
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0), *((piece, -3.0) for piece in pieces)]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)


def _clip(kind: Any, tokenizer: CLIPTokenizer) -> Any:
    encoder = kind(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=HIDDEN,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            projection_dim=HIDDEN,
            max_position_embeddings=CLIP_TOKENS,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    ).eval()
    _raise(encoder, 30.0, "token_embedding", "text_projection")
    return encoder


def _t5(tokenizer: T5Tokenizer) -> T5EncoderModel:
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=2 * HIDDEN,
        d_kv=16,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        tie_word_embeddings=False,
    )
    return T5EncoderModel(config).eval()


def _vae(halvings: int = 1) -> AutoencoderKL:
    """Factor 2: a picture of 32 pixels has latents of 16."""
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(*[8] * halvings, 16),
        down_block_types=("DownEncoderBlock2D",) * (halvings + 1),
        up_block_types=("UpDecoderBlock2D",) * (halvings + 1),
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=32,
        scaling_factor=1.0,
        shift_factor=0.0,
    ).eval()
    with torch.inference_mode():
        output = vae.decode(torch.randn(4, 4, 16, 16)).sample
    _scale(vae.decoder.conv_out, 0.6 / output.std())
    return vae


def _unet(**changes: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        norm_num_groups=8,
        **{"cross_attention_dim": HIDDEN, **changes},
    ).eval()


def _save_sd(folder: Path, scheduler: Any, kind: Any = StableDiffusionPipeline, **changes: Any) -> Path:
    torch.manual_seed(1)
    unet = _unet(**changes)
    tokenizer = clip_tokenizer()
    text_encoder = _clip(CLIPTextModel, tokenizer)
    _raise(unet, 4.0, "attn2.to_v", "attn2.to_out")
    with torch.inference_mode():
        output = unet(torch.randn(8, 4, 16, 16), torch.linspace(50, 950, 8), torch.randn(8, CLIP_TOKENS, HIDDEN)).sample
    _scale(unet.conv_out, 1.0 / output.std())
    pipe = kind(
        vae=_vae(),
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


def _raise(module: torch.nn.Module, gain: float, *names: str) -> None:
    """Multiplies the weights whose name holds one of `names`."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if any(part in name for part in names):
                parameter.mul_(gain)


def _scale(layer: torch.nn.Module, gain: Any) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(gain)
