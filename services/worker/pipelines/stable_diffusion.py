"""Stable Diffusion 1.x and 2.x (`StableDiffusionPipeline`): a UNet, one CLIP text encoder.

Role: the diffusers pipeline in four steps. Preparation, latents, timesteps, safety checker and decode are its own code;
a request run here equals the pipeline called alone with `generator=torch.Generator("cpu").manual_seed(seed)`.

What the UNet predicts (noise, velocity) is the solver's business: its config says so. The text is always padded to the
encoder's length without a mask; the padding is part of the result.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from common.errors import ConfigError, ErrorInfo, RequestError
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


class StableDiffusionStepPipeline:
    """A `StepPipeline` around a loaded `StableDiffusionPipeline` (`Any`: its components have no static types)."""

    mixes = ("steps", "guidance", "cfg")
    heeds_prompt_mask = False

    def __init__(self, pipe: Any, device: torch.device, defaults: ServingDefaults) -> None:
        _refuse_unsupported_unet(pipe)
        self.device = device
        self._pipe = pipe
        self._defaults = defaults

    def profile(self, model: str, max_num_inference_steps: int) -> ModelProfile:
        pipe, defaults = self._pipe, self._defaults
        factor = pipe.vae_scale_factor
        multiple = math.lcm(SIZE_MULTIPLE, factor)
        halvings = len(pipe.unet.config.block_out_channels) - 1
        max_side = (defaults.max_side or MAX_SIDE) // multiple * multiple
        trained = pipe.unet.config.sample_size
        height, width = (trained, trained) if isinstance(trained, int) else trained
        default_height, default_width = (
            min(side * factor, max_side) // multiple * multiple for side in (height, width)
        )
        smallest = math.ceil(factor * 2**halvings / multiple) * multiple
        steps = defaults.default_num_inference_steps or call_default(type(pipe), "num_inference_steps")
        guidance = defaults.default_guidance_scale
        return ModelProfile(
            model=model,
            pipeline=type(pipe).__name__,
            size=SizeRule(
                multiple=multiple,
                min_side=min(smallest, default_height, default_width),
                max_side=max_side,
                max_pixels=max_side * max_side,
                pixels_per_token=factor,
            ),
            default_height=default_height,
            default_width=default_width,
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
            self._pipe.check_inputs(params.prompt, params.height, params.width, None, params.negative_prompt)
        uncond = PromptText(params.negative_prompt or "") if params.guidance_scale > 1.0 else None
        return Prompts(PromptText(params.prompt), uncond)

    def encode_prompts(self, prompts: Sequence[PromptText]) -> list[EncodedPrompt]:
        pipe = self._pipe
        texts = [prompt.text for prompt in prompts]
        embeds, _ = pipe.encode_prompt(texts, self.device, 1, False)
        limit = TextLimit("the CLIP text encoder", pipe.tokenizer, pipe.tokenizer.model_max_length)
        return [
            EncodedPrompt(Conditioning(row), cuts(text, [limit]))
            for row, text in zip(embeds.split(1), texts, strict=True)
        ]

    def prepare_encode(
        self, request: DiffusionRequest, cond: Conditioning, uncond: Conditioning | None
    ) -> DiffusionRequestState:
        params = request.params
        pipe = with_own_scheduler(self._pipe, params)
        generator = torch.Generator("cpu").manual_seed(params.seed)
        dtype = cond.prompt_embeds.dtype
        timesteps = set_timesteps(pipe.scheduler, params, self.device)
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
            scales_model_input=hasattr(pipe.scheduler, "scale_model_input"),
        )

    def denoise_step(self, input_batch: StepInputBatch) -> list[torch.Tensor]:
        noise_pred = self._pipe.unet(
            input_batch.latents,
            input_batch.timesteps,
            encoder_hidden_states=input_batch.prompt_embeds,
            return_dict=False,
        )[0]
        return input_batch.split(guide(input_batch, noise_pred))

    def step_scheduler(
        self, states: Sequence[DiffusionRequestState], noise_preds: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | Exception]:
        return solve(states, noise_preds)

    def post_decode(self, state: DiffusionRequestState) -> Image.Image:
        pipe = self._pipe
        decoded = pipe.vae.decode(
            state.latents / pipe.vae.config.scaling_factor, return_dict=False, generator=state.generator
        )[0]
        require_finite(decoded)
        decoded, flagged = pipe.run_safety_checker(decoded, self.device, state.cond.prompt_embeds.dtype)
        if flagged is not None and any(flagged):
            raise RequestError(
                ErrorInfo("content_policy_violation", "the model's safety checker refused the picture it drew")
            )
        image: Image.Image = pipe.image_processor.postprocess(decoded, output_type="pil")[0]
        return image

    @functools.cached_property
    def _schedulers(self) -> tuple[str, ...]:
        return offered_schedulers(self._pipe.scheduler)


def _refuse_unsupported_unet(pipe: Any) -> None:
    """Raises `ConfigError` for a checkpoint whose UNet wants more than a prompt and latents."""
    config = pipe.unet.config
    reason = None
    if config.in_channels != pipe.vae.config.latent_channels:
        reason = f"its UNet takes {config.in_channels} channels: it is made for inpainting or another input image"
    elif config.time_cond_proj_dim is not None:
        reason = "its UNet takes the guidance scale as an input (time_cond_proj_dim), as distilled models do"
    elif config.class_embed_type is not None or config.addition_embed_type is not None:
        reason = "its UNet takes more conditions than a prompt (class_embed_type or addition_embed_type)"
    if reason is not None:
        raise ConfigError(f"this StableDiffusionPipeline checkpoint can't be served: {reason}")
