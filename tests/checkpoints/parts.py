"""What the tiny checkpoints are built of: tokenizers, text encoders, a VAE, a UNet, and gains to make them answer."""

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    UNet2DConditionModel,
)
from tokenizers import pre_tokenizers
from transformers import (
    CLIPTextConfig,
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


def tiny_t5_tokenizer() -> T5Tokenizer:
    pieces = sorted({piece for line in CORPUS for word in line.split() for piece in (f"▁{word}", *word)})
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0), *((piece, -3.0) for piece in pieces)]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)


def tiny_clip(kind: Any, tokenizer: CLIPTokenizer) -> Any:
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
    raise_gain(encoder, 30.0, "token_embedding", "text_projection")
    return encoder


def tiny_t5(tokenizer: T5Tokenizer) -> T5EncoderModel:
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


def tiny_vae(halvings: int = 1) -> AutoencoderKL:
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
    scale_weights(vae.decoder.conv_out, 0.6 / output.std())
    return vae


def tiny_unet(**changes: Any) -> UNet2DConditionModel:
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


def raise_gain(module: torch.nn.Module, gain: float, *names: str) -> None:
    """Multiplies the weights whose name holds one of `names`."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if any(part in name for part in names):
                parameter.mul_(gain)


def scale_weights(layer: torch.nn.Module, gain: Any) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(gain)


def tiny_clip_tokenizer() -> CLIPTokenizer:
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
