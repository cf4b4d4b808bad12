"""A tiny Z-Image."""

from pathlib import Path

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from tokenizers import pre_tokenizers
from transformers import (
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3Model,
)

from tests.checkpoints.parts import (
    CORPUS,
    HIDDEN,
    raise_gain,
    scale_weights,
    tiny_vae,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_z_image(folder: Path) -> Path:
    """Z-Image: prompts through a chat template and a language model, as long as they are; shifted latents."""
    torch.manual_seed(11)
    tokenizer = _tokenizer()
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=HIDDEN,
        axes_dims=[4, 6, 6],
        axes_lens=[546, 16, 16],  # texts of 544 tokens, pictures of 64 pixels,
    ).eval()
    with torch.no_grad():
        for token in (transformer.x_pad_token, transformer.cap_pad_token):  # what is trained up from zero
            token.normal_()
    raise_gain(transformer, 10.0, "adaLN_modulation", "t_embedder.mlp.2")
    with torch.inference_mode():
        output = transformer(
            list(torch.randn(8, 4, 1, 16, 16)),
            torch.linspace(0.05, 0.95, 8),
            list(torch.randn(8, 20, HIDDEN)),
            return_dict=False,
        )[0]
    scale_weights(transformer.all_final_layer["2-1"].linear, 1.0 / torch.stack(output).std())
    vae = tiny_vae()
    vae.register_to_config(scaling_factor=0.36, shift_factor=0.12)
    pipe = ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=_text_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=transformer,
    )
    pipe.save_pretrained(folder)
    return folder


def _text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen3Model:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
    )
    encoder = Qwen3Model(config).eval()
    raise_gain(encoder, 50.0, "embed_tokens")
    return encoder


def _tokenizer() -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer whose merges spell the corpus's words from left to right, as the CLIP one's do."""
    space = "Ġ"  # as byte-level tokenizers write it
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: dict[tuple[str, str], str] = {}
    for word in sorted({word.strip(",") for line in CORPUS for word in line.split()}):
        for start, rest in ((word[0], word[1:]), (space, word)):
            for end, letter in enumerate(rest):
                spelt = start + rest[:end]
                merges.setdefault((spelt, letter), spelt + letter)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*tokens, *merges.values(), *names]))}
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=list(merges),
        eos_token="<|im_end|>",
        additional_special_tokens=names,
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
    )
