"""Stable Diffusion 3 and 3.5, with and without the T5 encoder (`StableDiffusion3Pipeline`).

Role: the diffusers pipeline in four steps. Preparation, latents, timesteps and decode are its own code; a request run
here equals the pipeline called alone with `generator=torch.Generator("cpu").manual_seed(seed)`.

The text is always as long as its limits say, and its padding is not masked: it is part of the result. So prompts of
another `max_sequence_length` can't share a forward.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image

from common.messages import ModelProfile, SizeRule
from common.params import DiffusionRequest, SamplingParams
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
from services.worker.pipelines.solvers import (
    offered_schedulers,
    resolution_shift,
    set_timesteps,
    solve,
    step_arguments,
    with_own_scheduler,
)
from services.worker.state import Conditioning, DiffusionRequestState, EncodedPrompt, PromptText

ACCEPTS = ("max_sequence_length", "scheduler", "sigmas")
MAX_SEQUENCE_LENGTH = 512  # the most that the diffusers pipeline takes


class StableDiffusion3StepPipeline:
    """A `StepPipeline` around a loaded `StableDiffusion3Pipeline` (`Any`: its components have no static types)."""

    mixes = ("steps", "guidance", "cfg")
    heeds_prompt_mask = False

    def __init__(self, pipe: Any, device: torch.device, defaults: ServingDefaults) -> None:
        self.device = device
        self._pipe = pipe
        self._defaults = defaults
        # Of the T5 encoder; without one, so many zero tokens stand in its place, and they count in the picture.
        self._default_max_sequence_length: int = defaults.default_max_sequence_length or call_default(
            StableDiffusion3Pipeline, "max_sequence_length"
        )

    def profile(self, model: str, max_num_inference_steps: int) -> ModelProfile:
        pipe, defaults = self._pipe, self._defaults
        multiple = pipe.vae_scale_factor * pipe.patch_size
        limit = pipe.transformer.config.pos_embed_max_size * multiple  # the position table is cropped, never stretched
        max_side = min(limit, defaults.max_side or limit) // multiple * multiple
        side = min(pipe.default_sample_size * pipe.vae_scale_factor, max_side) // multiple * multiple
        steps = defaults.default_num_inference_steps or call_default(type(pipe), "num_inference_steps")
        guidance = defaults.default_guidance_scale
        return ModelProfile(
            model=model,
            pipeline=type(pipe).__name__,
            size=SizeRule(
                multiple=multiple,
                min_side=min(2 * multiple, side),
                max_side=max_side,
                max_pixels=max_side * max_side,
                pixels_per_token=multiple,
            ),
            default_height=side,
            default_width=side,
            default_num_inference_steps=min(steps, max_num_inference_steps),
            default_guidance_scale=call_default(type(pipe), "guidance_scale") if guidance is None else guidance,
            max_num_inference_steps=max_num_inference_steps,
            mixes=self.mixes,
            accepts=ACCEPTS,
            default_max_sequence_length=self._default_max_sequence_length,
            max_sequence_length_limit=MAX_SEQUENCE_LENGTH,
            schedulers=self._schedulers,
        )

    def prompts(self, request: DiffusionRequest) -> Prompts:
        refuse_unsupported(request, accepts=ACCEPTS)
        params = request.params
        with as_invalid_request():
            self._pipe.check_inputs(
                params.prompt, None, None, params.height, params.width, negative_prompt=params.negative_prompt
            )
        length = params.max_sequence_length or self._default_max_sequence_length
        uncond = PromptText(params.negative_prompt or "", length) if params.guidance_scale > 1.0 else None
        return Prompts(PromptText(params.prompt, length), uncond)

    def encode_prompts(self, prompts: Sequence[PromptText]) -> list[EncodedPrompt]:
        texts = [prompt.text for prompt in prompts]
        max_sequence_length = prompts[0].max_sequence_length
        embeds, _, pooled, _ = self._pipe.encode_prompt(
            prompt=texts,
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            device=self.device,
            max_sequence_length=max_sequence_length,
        )
        limits = self._text_limits(max_sequence_length)
        return [
            EncodedPrompt(Conditioning(row, pooled_embeds=pooled_row), cuts(text, limits))
            for row, pooled_row, text in zip(embeds.split(1), pooled.split(1), texts, strict=True)
        ]

    def prepare_encode(
        self, request: DiffusionRequest, cond: Conditioning, uncond: Conditioning | None
    ) -> DiffusionRequestState:
        params = request.params
        pipe = with_own_scheduler(self._pipe, params)
        generator = torch.Generator("cpu").manual_seed(params.seed)
        dtype = cond.prompt_embeds.dtype
        channels = pipe.transformer.config.in_channels
        latents = pipe.prepare_latents(1, channels, params.height, params.width, dtype, self.device, generator)
        timesteps = self._set_timesteps(pipe.scheduler, params, self._image_tokens(latents))
        return DiffusionRequestState(
            request=request,
            cond=cond,
            uncond=uncond,
            guidance_scale=params.guidance_scale,
            latents=latents,
            timesteps=timesteps,
            scheduler=pipe.scheduler,
            generator=generator,
            image_tokens=self._image_tokens(latents),
            extra_step_kwargs=step_arguments(pipe.scheduler, generator),
        )

    def denoise_step(self, input_batch: StepInputBatch) -> list[torch.Tensor]:
        noise_pred = self._pipe.transformer(
            hidden_states=input_batch.latents,
            timestep=input_batch.timesteps,
            encoder_hidden_states=input_batch.prompt_embeds,
            pooled_projections=input_batch.pooled_embeds,
            return_dict=False,
        )[0]
        return input_batch.split(guide(input_batch, noise_pred))

    def step_scheduler(
        self, states: Sequence[DiffusionRequestState], noise_preds: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | Exception]:
        return solve(states, noise_preds)

    def post_decode(self, state: DiffusionRequestState) -> Image.Image:
        vae = self._pipe.vae
        latents = (state.latents / vae.config.scaling_factor) + vae.config.shift_factor
        decoded = vae.decode(latents, return_dict=False)[0]
        require_finite(decoded)
        image: Image.Image = self._pipe.image_processor.postprocess(decoded, output_type="pil")[0]
        return image

    def _text_limits(self, max_sequence_length: int) -> list[TextLimit]:
        pipe = self._pipe
        limits = [
            TextLimit("the first CLIP text encoder", pipe.tokenizer, pipe.tokenizer_max_length),
            TextLimit("the second CLIP text encoder", pipe.tokenizer_2, pipe.tokenizer_max_length),
        ]
        if pipe.text_encoder_3 is not None:
            limits.append(TextLimit("the T5 text encoder", pipe.tokenizer_3, max_sequence_length))
        return limits

    def _image_tokens(self, latents: torch.Tensor) -> int:
        patch = self._pipe.patch_size
        return int((latents.shape[2] // patch) * (latents.shape[3] // patch))

    @functools.cached_property
    def _schedulers(self) -> tuple[str, ...]:
        return offered_schedulers(self._pipe.scheduler, self._set_timesteps)

    def _set_timesteps(self, scheduler: Any, params: SamplingParams, image_tokens: int = 256) -> torch.Tensor:
        if not scheduler.config.get("use_dynamic_shifting", None):
            return set_timesteps(scheduler, params, self.device)
        mu = resolution_shift(scheduler, image_tokens, max_shift=1.16)
        return set_timesteps(scheduler, params, self.device, mu=mu)
