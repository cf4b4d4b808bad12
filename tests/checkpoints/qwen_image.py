"""A tiny Qwen-Image."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import pre_tokenizers
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
)

from tests.checkpoints.parts import CORPUS, HIDDEN, raise_gain, scale_weights

LATENT_CHANNELS = 4
TEMPLATE_TOKENS = 34  # what the pipeline cuts off in front of every prompt, whatever the tokenizer
# The words of the pipeline's template, spaces as byte-level BPE spells them. One token each makes 34 with the rest.
TEMPLATE_WORDS = [
    *("system", "Describe", "Ġthe", "Ġimage", "Ġby", "Ġdetailing", "Ġcolor", "Ġshape", "Ġsize", "Ġtexture"),
    *("Ġquantity", "Ġtext", "Ġspatial", "Ġrelationships", "Ġof", "Ġobjects", "Ġand", "Ġbackground", "user"),
    "assistant",
]


def save_qwen_image(folder: Path) -> Path:
    """Qwen-Image: the prompt inside a template, a language model as text encoder, a schedule shifted by size."""
    torch.manual_seed(11)
    tokenizer = tiny_qwen_tokenizer()
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=HIDDEN,
        axes_dims_rope=(4, 6, 6),
    ).eval()
    pipe = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(  # as the hub's checkpoint has it, for pictures of fewer tokens
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=16,
            max_image_seq_len=256,
            shift_terminal=0.02,
        ),
        vae=tiny_qwen_vae(),
        text_encoder=tiny_qwen_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=transformer,
    )
    before_prompt = pipe.prompt_template_encode.partition("{}")[0]
    assert len(tokenizer(before_prompt).input_ids) == TEMPLATE_TOKENS == pipe.prompt_template_encode_start_idx
    raise_gain(transformer, 5.0, "add_v_proj")
    raise_gain(transformer, 2.0, "attn.norm_")  # sharper attention: a wrong rotary table or mask is seen
    raise_gain(transformer, 3.0, "timestep_embedder.linear_2")
    with torch.inference_mode():
        output = transformer(
            hidden_states=torch.randn(8, 64, 4 * LATENT_CHANNELS),
            timestep=torch.linspace(0.05, 0.95, 8),
            encoder_hidden_states=torch.randn(8, 20, HIDDEN),
            img_shapes=[[(1, 8, 8)]] * 8,
            return_dict=False,
        )[0]
    scale_weights(transformer.proj_out, 1.5 / output.std())
    pipe.save_pretrained(folder)
    return folder


def tiny_qwen_tokenizer() -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer whose merges spell whole words from left to right, those of the template first.

    Not learnt by counting, which breaks ties by chance. A word of the corpus has two tokens: with a space before it and
    without.
    """
    corpus = sorted({word.strip(",") for line in CORPUS for word in line.split()})
    merges: dict[tuple[str, str], str] = {}
    for word in (*TEMPLATE_WORDS, *corpus, *(f"Ġ{word}" for word in corpus)):
        start = word[0]
        for letter in word[1:]:
            merges.setdefault((start, letter), start + letter)
            start += letter
    tokens = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *merges.values(), "<|endoftext|>"])
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=list(merges),
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        model_max_length=2048,
    )


def tiny_qwen_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "hidden_size": HIDDEN,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 1,
            "out_hidden_size": HIDDEN,
            "fullatt_block_indexes": [0],
        },
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def tiny_qwen_vae() -> AutoencoderKLQwenImage:
    """Factor 2: a picture of 32 pixels has latents of 16, in 64 tokens."""
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.2, 0.8, 1.5, 1.0],
    ).eval()
    with torch.inference_mode():
        output = vae.decode(torch.randn(4, LATENT_CHANNELS, 1, 16, 16)).sample
    scale_weights(vae.decoder.conv_out, 0.45 / output.std())
    with torch.no_grad():  # grey on average, so that few pixels are black or white
        vae.decoder.conv_out.bias.sub_(output.mean((0, 2, 3, 4)) * (0.45 / output.std()))
    return vae
