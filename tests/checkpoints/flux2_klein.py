"""Tiny FLUX.2 klein checkpoints: with classifier-free guidance (base), and distilled to do without."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from tokenizers import pre_tokenizers
from transformers import (
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.checkpoints.parts import (
    CORPUS,
    HIDDEN,
    raise_gain,
    scale_weights,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def save_flux2_klein(folder: Path) -> Path:
    """FLUX.2 klein base: two forwards a step where guidance is on."""
    return _save_klein(folder, is_distilled=False)


def save_flux2_klein_distilled(folder: Path) -> Path:
    """FLUX.2 klein: distilled to few steps, it ignores guidance."""
    return _save_klein(folder, is_distilled=True)


def _save_klein(folder: Path, *, is_distilled: bool) -> Path:
    torch.manual_seed(13)
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * HIDDEN,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    ).eval()
    tokenizer = _tiny_qwen_tokenizer()
    raise_gain(transformer, 3.0, "timestep_embedder.linear_2", "modulation", "add_v_proj")
    raise_gain(transformer, 1.25, "norm_q", "norm_k", "norm_added")  # places matter, and yet no key counts alone
    with torch.inference_mode():
        output = transformer(
            hidden_states=torch.randn(8, 64, 16),
            timestep=torch.linspace(0.05, 0.95, 8),
            encoder_hidden_states=torch.randn(8, 64, 3 * HIDDEN),
            txt_ids=torch.cartesian_prod(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.arange(64.0)),
            img_ids=torch.cartesian_prod(torch.zeros(1), torch.arange(8.0), torch.arange(8.0), torch.zeros(1)),
            return_dict=False,
        )[0]
    scale_weights(transformer.proj_out, 1.0 / output.std())
    pipe = Flux2KleinPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_tiny_vae(),
        text_encoder=_tiny_qwen(tokenizer),
        tokenizer=tokenizer,
        is_distilled=is_distilled,
    )
    pipe.save_pretrained(folder)
    return folder


def _tiny_qwen_tokenizer() -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer whose merges spell the corpus's words from left to right, each with the space before
    it. It is built as that of `parts.tiny_clip_tokenizer` is, for the same reason."""
    merges: dict[tuple[str, str], str] = {}
    for word in sorted({word.strip(",") for line in CORPUS for word in line.split()}):
        start = "Ġ"
        for letter in word:
            merges.setdefault((start, letter), start + letter)
            start += letter
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *merges.values()]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*tokens, *special]))}
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=list(merges),
        extra_special_tokens=special[1:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )


def _tiny_qwen(tokenizer: Qwen2Tokenizer) -> Qwen3ForCausalLM:
    """The pipeline reads the hidden states of layers 9, 18 and 27, so it takes 28 of them."""
    encoder = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=HIDDEN,
            intermediate_size=HIDDEN,
            num_hidden_layers=28,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            initializer_range=0.2,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
    ).eval()
    with torch.no_grad():
        # Else 500 equal padding tokens drown the prompt. So each of them says what it has seen of it.
        encoder.model.embed_tokens.weight[tokenizer.pad_token_id] = 0.0
    return encoder


def _tiny_vae() -> AutoencoderKLFlux2:
    """Factor 2, as `parts.tiny_vae`. Its statistics of the latents are such that to leave them out shows."""
    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
    ).eval()
    vae.bn.running_mean.normal_(std=0.3)
    vae.bn.running_var.uniform_(0.5, 1.5)
    with torch.inference_mode():
        output = vae.decode(torch.randn(4, 4, 16, 16)).sample
    scale_weights(vae.decoder.conv_out, 0.45 / output.std())
    return vae
