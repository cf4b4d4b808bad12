"""What is checked: Stable Diffusion XL and Qwen-Image as their published configs say, with random weights.

Role: step pipelines of the real classes, built on the device itself, and requests whose texts are made up, so that no
text encoder and no download is needed. Random weights hardly heed the text and the timestep. So some are made larger
and the output is scaled to that of a trained model, until a row with another's text is another row by far; `measure`
looks whether it is. It measures nothing itself.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from common.params import DataHome, DiffusionRequest, SamplingParams
from services.worker.input_batch import StepInputBatch
from services.worker.pipelines.preparing import call_default
from services.worker.pipelines.protocol import ServingDefaults, StepPipeline
from services.worker.pipelines.qwen_image import QwenImageStepPipeline
from services.worker.pipelines.stable_diffusion_xl import StableDiffusionXLStepPipeline
from services.worker.state import Conditioning, DiffusionRequestState

Size = tuple[int, int]  # height and width in pixels

NOWHERE = DataHome(gateway_id="", address="")
TEXT_TOKENS = (120, 40, 300, 80)  # of texts that are as long as they are, one request after another

# https://huggingface.co/stabilityai/stable-diffusion-xl-base-1.0, unet/config.json and vae/config.json
SDXL_UNET: dict[str, Any] = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 2,
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
SDXL_VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "sample_size": 1024,
    "scaling_factor": 0.13025,
}
TINY_UNET: dict[str, Any] = {
    "sample_size": 4,
    "block_out_channels": (32, 64),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "transformer_layers_per_block": (1, 1),
    "attention_head_dim": (1, 2),
    "cross_attention_dim": 32,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 64,
}
TINY_VAE: dict[str, Any] = SDXL_VAE | {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "layers_per_block": 1}
SDXL_GAINS = {"attn2.to_v": 3.0, "attn2.to_out": 3.0, "time_embedding.linear_2": 8.0, "add_embedding.linear_2": 8.0}

# https://huggingface.co/Qwen/Qwen-Image, transformer/config.json and vae/config.json: the classes' own defaults
QWEN_TRANSFORMER: dict[str, Any] = {}
QWEN_VAE: dict[str, Any] = {}
TINY_TRANSFORMER: dict[str, Any] = {
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}
TINY_QWEN_VAE: dict[str, Any] = {"base_dim": 8, "num_res_blocks": 1}
QWEN_GAINS = {"add_v_proj": 16.0, "timestep_embedder.linear_2": 3.0}


class Subject(NamedTuple):
    """A model on the device, and the texts that are made up for it."""

    name: str
    pipeline: StepPipeline
    text: Callable[[int], Conditioning]  # the one with this number
    parameters: int  # of the denoiser
    default_steps: int  # of a picture, if a user says nothing

    def state(self, number: int, size: Size, steps: int, guidance: float | None) -> DiffusionRequestState:
        """A prepared request. `number` says its text and its seed, `guidance` the scale, None that it has none."""
        height, width = size
        params = SamplingParams(
            prompt="",
            height=height,
            width=width,
            num_inference_steps=steps,
            guidance_scale=1.0 if guidance is None else guidance,
            true_cfg_scale=guidance,
            seed=number,
        )
        request = DiffusionRequest(f"{self.name}-{number}", self.name, params, NOWHERE)
        cond = self.text(2 * number)
        uncond = None if guidance is None else self.text(2 * number + 1)
        return self.pipeline.prepare_encode(request, cond, uncond)


def stable_diffusion_xl(device: torch.device, dtype: torch.dtype, tiny: bool) -> Subject:
    """`StableDiffusionXLStepPipeline` around random weights."""
    config = TINY_UNET if tiny else SDXL_UNET
    pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
    width = config["cross_attention_dim"]
    tokenizer = CLIPTokenizer(vocab={"<|startoftext|>": 0, "<|endoftext|>": 1}, merges=[], model_max_length=77)
    # They are never called. The pipeline asks them how wide a pooled text is.
    encoder = CLIPTextConfig(
        vocab_size=2,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        projection_dim=pooled,
        bos_token_id=0,
        eos_token_id=1,
    )
    with _weights_on(device, dtype):
        pipe: Any = StableDiffusionXLPipeline(
            vae=AutoencoderKL(**TINY_VAE if tiny else SDXL_VAE),
            text_encoder=CLIPTextModel(encoder),
            text_encoder_2=CLIPTextModelWithProjection(encoder),
            tokenizer=tokenizer,
            tokenizer_2=tokenizer,
            unet=UNet2DConditionModel(**config),
            scheduler=EulerDiscreteScheduler(
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="scaled_linear",
                steps_offset=1,
                timestep_spacing="leading",
            ),
            add_watermarker=False,
        )

    def text(number: int) -> Conditioning:
        random = torch.Generator().manual_seed(number)
        embeds, pooled_embeds = (
            torch.randn((1, 77, width), generator=random),
            torch.randn((1, pooled), generator=random),
        )
        return Conditioning(embeds.to(device, dtype), pooled_embeds=pooled_embeds.to(device, dtype))

    step_pipeline: Any = StableDiffusionXLStepPipeline(pipe, device, ServingDefaults())
    subject = Subject("sdxl", step_pipeline, text, *_facts(pipe, pipe.unet))
    _make_it_answer(subject, pipe.unet, SDXL_GAINS, pipe.unet.conv_out)
    _make_it_draw(pipe.vae, pipe.vae.decoder.conv_out, (1, 4, 8, 8))
    return subject


def qwen_image(device: torch.device, dtype: torch.dtype, tiny: bool) -> Subject:
    """`QwenImageStepPipeline` around random weights."""
    with _weights_on(device, dtype):
        transformer: Any = QwenImageTransformer2DModel(**TINY_TRANSFORMER if tiny else QWEN_TRANSFORMER)
        vae: Any = AutoencoderKLQwenImage(**TINY_QWEN_VAE if tiny else QWEN_VAE)
    pipe: Any = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            shift_terminal=0.02,
        ),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
    )
    width = transformer.config.joint_attention_dim

    def text(number: int) -> Conditioning:
        random = torch.Generator().manual_seed(number)
        tokens = TEXT_TOKENS[number % len(TEXT_TOKENS)]
        return Conditioning(torch.randn((1, tokens, width), generator=random).to(device, dtype))

    step_pipeline: Any = QwenImageStepPipeline(pipe, device, ServingDefaults())
    subject = Subject("qwen-image", step_pipeline, text, *_facts(pipe, transformer))
    _make_it_answer(subject, transformer, QWEN_GAINS, transformer.proj_out)
    _make_it_draw(vae, vae.decoder.conv_out, (1, vae.config.z_dim, 1, 8, 8))
    return subject


MODELS: dict[str, Callable[[torch.device, torch.dtype, bool], Subject]] = {
    "sdxl": stable_diffusion_xl,
    "qwen-image": qwen_image,
}


@contextlib.contextmanager
def _weights_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Modules that are made here have their weights on the device from the first, each drawn from the same seed."""
    default = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(default)


def _facts(pipe: Any, denoiser: torch.nn.Module) -> tuple[int, int]:
    parameters = sum(parameter.numel() for parameter in denoiser.parameters())
    return parameters, call_default(type(pipe), "num_inference_steps")


def _make_it_answer(
    subject: Subject, denoiser: torch.nn.Module, gains: Mapping[str, float], output: torch.nn.Module
) -> None:
    """Multiplies the weights whose names hold one of `gains`, and scales the prediction to that of a trained model."""
    denoiser.eval()
    for name, parameter in denoiser.named_parameters():
        for part, gain in gains.items():
            if part in name:
                parameter.data.mul_(gain)
    batch = StepInputBatch([subject.state(0, (64, 64), 4, None)])
    batch.gather()
    _scale(output, 1.0 / subject.pipeline.denoise_step(batch)[0].float().std())


def _make_it_draw(vae: Any, output: torch.nn.Module, latents: tuple[int, ...]) -> None:
    """Scales the decoder's output so that a picture is neither grey nor black and white."""
    vae.eval()
    noise = torch.randn(latents, generator=torch.Generator().manual_seed(0)).to(vae.device, vae.dtype)
    _scale(output, 0.5 / vae.decode(noise, return_dict=False)[0].float().std())


def _scale(layer: torch.nn.Module, gain: torch.Tensor) -> None:
    for parameter in layer.parameters():
        parameter.data.mul_(gain.to(parameter.dtype))
