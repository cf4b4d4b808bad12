"""Qwen-Image (`QwenImagePipeline`): a transformer over text and image tokens, a language model as text encoder.

Role: the diffusers pipeline in four steps. Preparation, latents, timesteps and decode are its own code; a request run
here equals the pipeline called alone with `generator=torch.Generator("cpu").manual_seed(seed)`.

Guidance is `true_cfg_scale`, and only with a negative prompt, be it an empty one: without, this model is not guided,
whatever the scale. `guidance_scale` is for distilled transformers, of which there are none.

A text is as long as it is, and the padding beside longer ones is masked. Latents are sequences of image tokens. So
texts and pictures of all sizes can share a forward, if each row has its own rotary tables (`qwen_image_attention.py`).
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from common.errors import ConfigError
from common.messages import CfgRule, ModelProfile, SizeRule
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
from services.worker.pipelines.qwen_image_attention import ImageShape, RowLayout, RowsAttnProcessor, row_layout
from services.worker.pipelines.solvers import (
    offered_schedulers,
    resolution_shift,
    set_timesteps,
    solve,
    step_arguments,
    with_own_scheduler,
)
from services.worker.state import Conditioning, DiffusionRequestState, EncodedPrompt, PromptText

ACCEPTS = ("true_cfg_scale", "max_sequence_length", "scheduler", "sigmas")
PATCH = 2  # the pipeline packs 2 x 2 latent pixels into one token, whatever the transformer's config says
MAX_SIDE = 2048  # pixels; the rotary table ends far beyond, but pictures larger than the trained ones repeat themselves
NO_GUIDANCE = 1.0  # the default of a guidance_scale that is not heeded


class QwenImageStepPipeline:
    """A `StepPipeline` around a loaded `QwenImagePipeline` (`Any`: its components have no static types)."""

    mixes = ("steps", "guidance", "cfg", "resolution", "max_sequence_length")
    heeds_prompt_mask = True

    def __init__(self, pipe: Any, device: torch.device, defaults: ServingDefaults) -> None:
        _refuse_unsupported_parts(pipe)
        pipe.transformer.set_attn_processor(RowsAttnProcessor())
        self.device = device
        self._pipe = pipe
        self._defaults = defaults
        length: int = defaults.default_max_sequence_length or call_default(type(pipe), "max_sequence_length")
        self._default_max_sequence_length = min(length, pipe.tokenizer_max_length)
        self._default_true_cfg_scale: float = call_default(type(pipe), "true_cfg_scale")
        guidance = defaults.default_guidance_scale
        self._default_guidance_scale = NO_GUIDANCE if guidance is None else guidance

    def profile(self, model: str, max_num_inference_steps: int) -> ModelProfile:
        pipe, defaults = self._pipe, self._defaults
        multiple = pipe.vae_scale_factor * PATCH
        max_side = (defaults.max_side or MAX_SIDE) // multiple * multiple
        side = min(pipe.default_sample_size * pipe.vae_scale_factor, max_side)
        steps = defaults.default_num_inference_steps or call_default(type(pipe), "num_inference_steps")
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
            default_guidance_scale=self._default_guidance_scale,
            max_num_inference_steps=max_num_inference_steps,
            mixes=self.mixes,
            cfg=CfgRule(scale_field="true_cfg_scale", threshold=1.0, needs_negative_prompt=True),
            accepts=ACCEPTS,
            default_true_cfg_scale=self._default_true_cfg_scale,
            default_max_sequence_length=self._default_max_sequence_length,
            max_sequence_length_limit=pipe.tokenizer_max_length,
            schedulers=self._schedulers,
        )

    def prompts(self, request: DiffusionRequest) -> Prompts:
        refuse_unsupported(request, accepts=ACCEPTS)
        params = request.params
        length = params.max_sequence_length or self._default_max_sequence_length
        with as_invalid_request():
            self._pipe.check_inputs(
                params.prompt,
                params.height,
                params.width,
                negative_prompt=params.negative_prompt,
                max_sequence_length=length,
            )
        guided = self._true_cfg_scale(params) > 1 and params.negative_prompt is not None
        return Prompts(
            PromptText(params.prompt, length), PromptText(params.negative_prompt, length) if guided else None
        )

    def encode_prompts(self, prompts: Sequence[PromptText]) -> list[EncodedPrompt]:
        texts = [prompt.text for prompt in prompts]
        max_sequence_length = prompts[0].max_sequence_length
        # (texts, tokens, width), and (texts, tokens) or None where all tokens count
        embeds, mask = self._pipe.encode_prompt(texts, self.device, max_sequence_length=max_sequence_length)
        lengths = [embeds.shape[1]] * len(texts) if mask is None else mask.sum(1).tolist()
        # Of the template, what stands before the prompt is not counted, and what stands behind it is dropped first.
        limit = TextLimit("the text encoder", self._pipe.tokenizer, max_sequence_length)
        return [
            EncodedPrompt(Conditioning(embeds[index : index + 1, :length]), cuts(text, [limit]))
            for index, (text, length) in enumerate(zip(texts, lengths, strict=True))
        ]

    def prepare_encode(
        self, request: DiffusionRequest, cond: Conditioning, uncond: Conditioning | None
    ) -> DiffusionRequestState:
        params = request.params
        pipe = with_own_scheduler(self._pipe, params)
        generator = torch.Generator("cpu").manual_seed(params.seed)
        dtype = cond.prompt_embeds.dtype
        channels = pipe.transformer.config.in_channels // PATCH**2
        latents = pipe.prepare_latents(1, channels, params.height, params.width, dtype, self.device, generator)
        image_tokens = int(latents.shape[1])
        timesteps = self._set_timesteps(pipe.scheduler, params, image_tokens)
        return DiffusionRequestState(
            request=request,
            cond=cond,
            uncond=uncond,
            guidance_scale=self._true_cfg_scale(params),
            latents=latents,
            timesteps=timesteps,
            scheduler=pipe.scheduler,
            generator=generator,
            image_tokens=image_tokens,
            extra_step_kwargs=step_arguments(pipe.scheduler, generator),
            warnings=self._warnings(params),
        )

    def denoise_step(self, input_batch: StepInputBatch) -> list[torch.Tensor]:
        latents = input_batch.latents
        assert isinstance(latents, torch.Tensor)  # packed, so they are padded and not listed
        shapes, layout = input_batch.once("layout", lambda: self._shapes_and_layout(input_batch))
        noise_pred = self._pipe.transformer(
            hidden_states=latents,
            timestep=input_batch.timesteps.to(latents.dtype) / 1000,
            encoder_hidden_states=input_batch.prompt_embeds,
            img_shapes=shapes,
            attention_kwargs={} if layout is None else {"layout": layout},
            return_dict=False,
        )[0]
        return input_batch.split(_guide(input_batch, noise_pred))

    def step_scheduler(
        self, states: Sequence[DiffusionRequestState], noise_preds: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | Exception]:
        return solve(states, noise_preds)

    def post_decode(self, state: DiffusionRequestState) -> Image.Image:
        pipe, params = self._pipe, state.request.params
        vae, config = pipe.vae, pipe.vae.config
        latents = pipe._unpack_latents(state.latents, params.height, params.width, pipe.vae_scale_factor).to(vae.dtype)
        mean, std = (
            torch.tensor(values).view(1, config.z_dim, 1, 1, 1).to(latents.device, latents.dtype)
            for values in (config.latents_mean, config.latents_std)
        )
        # Divided by the inverse, as the pipeline does: in half precision a product is another number.
        decoded = vae.decode(latents / (1.0 / std) + mean, return_dict=False)[0][:, :, 0]
        require_finite(decoded)
        image: Image.Image = pipe.image_processor.postprocess(decoded, output_type="pil")[0]
        return image

    @functools.cached_property
    def _schedulers(self) -> tuple[str, ...]:
        return offered_schedulers(self._pipe.scheduler, self._set_timesteps)

    def _set_timesteps(self, scheduler: Any, params: SamplingParams, image_tokens: int = 4096) -> torch.Tensor:
        steps = params.num_inference_steps
        mu = resolution_shift(scheduler, image_tokens)
        return set_timesteps(scheduler, params, self.device, sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)

    def _true_cfg_scale(self, params: SamplingParams) -> float:
        return self._default_true_cfg_scale if params.true_cfg_scale is None else params.true_cfg_scale

    def _warnings(self, params: SamplingParams) -> tuple[str, ...]:
        if params.guidance_scale == self._default_guidance_scale:
            return ()
        return ("guidance_scale has no effect: this model is guided by true_cfg_scale, with a negative_prompt",)

    def _image_shape(self, state: DiffusionRequestState) -> ImageShape:
        params, factor = state.request.params, self._pipe.vae_scale_factor
        return 1, params.height // factor // PATCH, params.width // factor // PATCH

    def _shapes_and_layout(self, batch: StepInputBatch) -> tuple[list[list[ImageShape]], RowLayout | None]:
        """What the transformer is told of each row's size, and what its attention is. No layout where rows are so alike
        that diffusers' own attention does. Sizes may differ without any padding: 512 x 1024 has as many tokens as
        1024 x 512."""
        shapes = [self._image_shape(state) for state in batch.row_states]
        largest = max(shapes, key=lambda shape: shape[1] * shape[2])  # the latents are padded to it
        told = [[largest]] * batch.rows  # it can't be told more than one size, and with a layout it needs none
        if len(set(shapes)) == 1 and batch.prompt_mask is None:
            return told, None
        text_tokens = batch.prompt_embeds.shape[1]
        pos_embed = self._pipe.transformer.pos_embed
        return told, row_layout(pos_embed, shapes, text_tokens, batch.prompt_mask, batch.image_mask, self.device)


def _guide(batch: StepInputBatch, noise_pred: torch.Tensor) -> torch.Tensor:
    """Classifier-free guidance, after which each token is as long a vector as its conditioned prediction was."""
    combined = guide(batch, noise_pred)
    if batch.rows > batch.requests:
        guided = combined[batch.guided]
        cond_norm = torch.norm(noise_pred[batch.guided], dim=-1, keepdim=True)
        combined[batch.guided] = guided * (cond_norm / torch.norm(guided, dim=-1, keepdim=True))
    return combined


def _refuse_unsupported_parts(pipe: Any) -> None:
    """Raises `ConfigError` for a checkpoint whose parts the diffusers pipeline itself can't run."""
    for name in ("guidance_embeds", "use_additional_t_cond"):
        if pipe.transformer.config.get(name, False):
            raise ConfigError(
                f"the checkpoint's transformer has {name}=True: diffusers' text-to-image pipeline can't run it"
            )
