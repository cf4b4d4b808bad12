"""Stable Diffusion XL (`StableDiffusionXLPipeline`): a UNet, two CLIP text encoders, the picture's size as a condition.

Role: the diffusers pipeline in four steps. Preparation, latents, timesteps, time ids and watermark are its own code; a
request run here equals the pipeline called alone with `generator=torch.Generator("cpu").manual_seed(seed)`.

An absent negative prompt is not an empty one: where the checkpoint has `force_zeros_for_empty_prompt`, its embeddings
are zeros. The text is always padded to the encoders' length without a mask; the padding is part of the result. The
call's `guidance_rescale` and `denoising_end` are left at their defaults, which change nothing.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from common.errors import ConfigError
from common.messages import ModelProfile, SizeRule
from common.params import DiffusionRequest
from services.worker.input_batch import StepInputBatch, guide
from services.worker.pipelines.preparing import (
    TextLimit,
    as_invalid_request,
    call_default,
    cuts,
    refuse_unsupported,
    require_finite,
)
from services.worker.pipelines.protocol import Prompts, ServingDefaults
from services.worker.pipelines.solvers import offered_schedulers, set_timesteps, solve, with_own_scheduler
from services.worker.state import Conditioning, DiffusionRequestState, EncodedPrompt, PromptText

ACCEPTS = ("scheduler", "sigmas", "timesteps")
SIZE_MULTIPLE = 8  # what the pipeline's own check_inputs asks for, whatever the VAE
MAX_SIDE = 2048  # the UNet has no limit of its own; far beyond its training size pictures repeat themselves anyway
TIME_IDS = 6  # original height and width, crop's top and left, target height and width


class StableDiffusionXLStepPipeline:
    """A `StepPipeline` around a loaded `StableDiffusionXLPipeline` (`Any`: its components have no static types)."""

    mixes = ("steps", "guidance", "cfg")
    heeds_prompt_mask = False

    def __init__(self, pipe: Any, device: torch.device, defaults: ServingDefaults) -> None:
        _refuse_unsupported(pipe)
        if pipe.vae.dtype == torch.float16 and pipe.vae.config.force_upcast:
            # It overflows in half precision. Each call of the pipeline converts it to float32 and back, which loses
            # nothing; here it stays converted, so that no thread ever sees it half-way.
            pipe.vae.to(dtype=torch.float32)
        self.device = device
        self._pipe = pipe
        self._defaults = defaults

    def profile(self, model: str, max_num_inference_steps: int) -> ModelProfile:
        pipe, defaults = self._pipe, self._defaults
        factor = pipe.vae_scale_factor
        multiple = math.lcm(SIZE_MULTIPLE, factor)
        halvings = len(pipe.unet.config.block_out_channels) - 1
        max_side = (defaults.max_side or MAX_SIDE) // multiple * multiple
        side = min(pipe.default_sample_size * factor, max_side) // multiple * multiple
        smallest = math.ceil(factor * 2**halvings / multiple) * multiple
        steps = defaults.default_num_inference_steps or call_default(type(pipe), "num_inference_steps")
        guidance = defaults.default_guidance_scale
        return ModelProfile(
            model=model,
            pipeline=type(pipe).__name__,
            size=SizeRule(
                multiple=multiple,
                min_side=min(smallest, side),
                max_side=max_side,
                max_pixels=max_side * max_side,
                pixels_per_token=factor,
            ),
            default_height=side,
            default_width=side,
            default_num_inference_steps=min(steps, max_num_inference_steps),
            default_guidance_scale=call_default(type(pipe), "guidance_scale") if guidance is None else guidance,
            max_num_inference_steps=max_num_inference_steps,
            mixes=self.mixes,
            accepts=ACCEPTS,
            schedulers=self._schedulers,
        )

    def prompts(self, request: DiffusionRequest) -> Prompts:
        refuse_unsupported(request, accepts=ACCEPTS)
        params = request.params
        with as_invalid_request():
            self._pipe.check_inputs(params.prompt, None, params.height, params.width, None, params.negative_prompt)
        uncond = None
        if params.guidance_scale > 1.0:
            zeros = params.negative_prompt is None and self._pipe.config.force_zeros_for_empty_prompt
            uncond = PromptText(None if zeros else params.negative_prompt or "")
        return Prompts(PromptText(params.prompt), uncond)

    def encode_prompts(self, prompts: Sequence[PromptText]) -> list[EncodedPrompt]:
        texts = [prompt.text or "" for prompt in prompts]
        embeds, _, pooled, _ = self._pipe.encode_prompt(texts, device=self.device, do_classifier_free_guidance=False)
        limits = self._text_limits()
        encoded = []
        for prompt, row, pooled_row in zip(prompts, embeds.split(1), pooled.split(1), strict=True):
            if prompt.text is None:  # its place in the call only gave the shape
                zeros = Conditioning(torch.zeros_like(row), pooled_embeds=torch.zeros_like(pooled_row))
                encoded.append(EncodedPrompt(zeros))
            else:
                encoded.append(EncodedPrompt(Conditioning(row, pooled_embeds=pooled_row), cuts(prompt.text, limits)))
        return encoded

    def prepare_encode(
        self, request: DiffusionRequest, cond: Conditioning, uncond: Conditioning | None
    ) -> DiffusionRequestState:
        params = request.params
        pipe = with_own_scheduler(self._pipe, params)
        generator = torch.Generator("cpu").manual_seed(params.seed)
        dtype = cond.prompt_embeds.dtype
        timesteps = set_timesteps(pipe.scheduler, params, self.device)
        # After the timesteps: how far the solver scales the noise depends on them.
        latents = pipe.prepare_latents(
            1, pipe.unet.config.in_channels, params.height, params.width, dtype, self.device, generator
        )
        return DiffusionRequestState(
            request=request,
            cond=cond,
            uncond=uncond,
            guidance_scale=params.guidance_scale,
            latents=latents,
            timesteps=timesteps,
            scheduler=pipe.scheduler,
            generator=generator,
            image_tokens=latents.shape[2] * latents.shape[3],
            extra_step_kwargs=pipe.prepare_extra_step_kwargs(generator, call_default(type(pipe), "eta")),
            scales_model_input=True,
        )

    def denoise_step(self, input_batch: StepInputBatch) -> list[torch.Tensor]:
        time_ids = input_batch.once("time_ids", lambda: self._time_ids(input_batch))
        noise_pred = self._pipe.unet(
            input_batch.latents,
            input_batch.timesteps,
            encoder_hidden_states=input_batch.prompt_embeds,
            added_cond_kwargs={"text_embeds": input_batch.pooled_embeds, "time_ids": time_ids},
            return_dict=False,
        )[0]
        return input_batch.split(guide(input_batch, noise_pred))

    def step_scheduler(
        self, states: Sequence[DiffusionRequestState], noise_preds: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | Exception]:
        return solve(states, noise_preds)

    def post_decode(self, state: DiffusionRequestState) -> Image.Image:
        pipe, config = self._pipe, self._pipe.vae.config
        latents = state.latents.to(pipe.vae.dtype)
        mean, std = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
        if mean is not None and std is not None:
            latents = latents * _of_channels(std, latents) / config.scaling_factor + _of_channels(mean, latents)
        else:
            latents = latents / config.scaling_factor
        decoded = pipe.vae.decode(latents, return_dict=False)[0]
        require_finite(decoded)
        if pipe.watermark is not None:  # where the package for it is installed, as the pipeline has it
            decoded = pipe.watermark.apply_watermark(decoded)
        image: Image.Image = pipe.image_processor.postprocess(decoded, output_type="pil")[0]
        return image

    @functools.cached_property
    def _schedulers(self) -> tuple[str, ...]:
        return offered_schedulers(self._pipe.scheduler)

    def _text_limits(self) -> list[TextLimit]:
        pipe = self._pipe
        return [
            TextLimit("the first CLIP text encoder", pipe.tokenizer, pipe.tokenizer.model_max_length),
            TextLimit("the second CLIP text encoder", pipe.tokenizer_2, pipe.tokenizer_2.model_max_length),
        ]

    def _time_ids(self, batch: StepInputBatch) -> torch.Tensor:
        """(rows, 6): a picture of the size asked for, cut from one of that size at its corner, for both rows of it."""
        pipe = self._pipe
        corner = call_default(type(pipe), "crops_coords_top_left")
        rows = [
            pipe._get_add_time_ids(
                (params.height, params.width),
                corner,
                (params.height, params.width),
                dtype=batch.prompt_embeds.dtype,
                text_encoder_projection_dim=pipe.text_encoder_2.config.projection_dim,
            )
            for params in (state.request.params for state in batch.row_states)
        ]
        return torch.cat(rows).to(self.device)


def _of_channels(values: Sequence[float], latents: torch.Tensor) -> torch.Tensor:
    """(1, channels, 1, 1), on the latents' device and of their type."""
    return torch.tensor(values).view(1, -1, 1, 1).to(latents.device, latents.dtype)


def _refuse_unsupported(pipe: Any) -> None:
    """Raises `ConfigError` for a checkpoint that wants more than a prompt, a size and latents."""
    config = pipe.unet.config
    reason = None
    if None in (pipe.text_encoder, pipe.text_encoder_2, pipe.tokenizer, pipe.tokenizer_2):
        reason = "one of its two text encoders or tokenizers is missing, as in a refiner, which needs a picture"
    elif config.in_channels != pipe.vae.config.latent_channels:
        reason = f"its UNet takes {config.in_channels} channels: it is made for inpainting or another input image"
    elif config.time_cond_proj_dim is not None:
        reason = "its UNet takes the guidance scale as an input (time_cond_proj_dim), as distilled models do"
    elif config.addition_embed_type != "text_time" or config.class_embed_type is not None:
        reason = "its UNet does not take the conditions of this pipeline (addition_embed_type must be text_time)"
    elif config.encoder_hid_dim_type is not None:
        reason = "its UNet takes more conditions than a prompt (encoder_hid_dim_type)"
    else:
        pooled = pipe.text_encoder_2.config.projection_dim
        taken = pipe.unet.add_embedding.linear_1.in_features - pooled
        if taken != TIME_IDS * config.addition_time_embed_dim:
            reason = (
                "its UNet takes other numbers than the picture's size, as that of a refiner does, which needs a picture"
            )
    if reason is not None:
        raise ConfigError(f"this StableDiffusionXLPipeline checkpoint can't be served: {reason}")
