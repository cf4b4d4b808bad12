"""FLUX.1 (`FluxPipeline`): a transformer over text and image tokens, a CLIP and a T5 text encoder.

Role: the diffusers pipeline in four steps. Preparation, latents, timesteps and decode are its own code; a request run
here equals the pipeline called alone with `generator=torch.Generator("cpu").manual_seed(seed)`.

`guidance_scale` is an input of the transformer (dev), or of no effect (schnell). Classifier-free guidance is apart from
it: `true_cfg_scale`, and only with a negative prompt, be it an empty one.

The text is always padded to its limit, and the padding is not masked: it is part of the result. So prompts of another
`max_sequence_length` can't share a forward. Pictures of other sizes can: latents are sequences of image tokens, those
that are added to make rows equally long are masked, and each row has its own rotary table (`flux_attention.py`).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from common.messages import CfgRule, ModelProfile, SizeRule
from common.params import DiffusionRequest, SamplingParams
from services.worker.input_batch import StepInputBatch, guide
from services.worker.pipelines.flux_attention import attention_arguments, take_row_rotary
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

ACCEPTS = ("true_cfg_scale", "max_sequence_length", "scheduler", "sigmas")
PATCH = 2  # the pipeline packs 2 x 2 latent pixels into one token
MAX_SIDE = 2048  # pixels; the model has no limit of its own, but what it was trained on ends there
MAX_SEQUENCE_LENGTH = 512  # the most that the diffusers pipeline takes


class _Layout(NamedTuple):
    """What the transformer is told of a batch beside its rows' tensors, the same at each step."""

    txt_ids: torch.Tensor  # (text tokens, 3)
    img_ids: torch.Tensor  # (image tokens, 3), of the largest picture; of no effect where each row has its own table
    guidance: torch.Tensor | None  # (rows,) float32, where guidance is an input
    attention: dict[str, Any]


class FluxStepPipeline:
    """A `StepPipeline` around a loaded `FluxPipeline` (`Any`: its components have no static types)."""

    mixes = ("steps", "guidance", "cfg", "resolution")
    heeds_prompt_mask = False

    def __init__(self, pipe: Any, device: torch.device, defaults: ServingDefaults) -> None:
        take_row_rotary(pipe.transformer)
        self.device = device
        self._pipe = pipe
        self._defaults = defaults
        self._default_max_sequence_length: int = defaults.default_max_sequence_length or call_default(
            type(pipe), "max_sequence_length"
        )
        self._default_true_cfg_scale: float = call_default(type(pipe), "true_cfg_scale")
        guidance = defaults.default_guidance_scale
        self._default_guidance_scale: float = (
            call_default(type(pipe), "guidance_scale") if guidance is None else guidance
        )

    def profile(self, model: str, max_num_inference_steps: int) -> ModelProfile:
        pipe, defaults = self._pipe, self._defaults
        multiple = pipe.vae_scale_factor * PATCH
        max_side = (defaults.max_side or MAX_SIDE) // multiple * multiple
        side = min(pipe.default_sample_size * pipe.vae_scale_factor, max_side) // multiple * multiple
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
            max_sequence_length_limit=MAX_SEQUENCE_LENGTH,
            schedulers=self._schedulers,
        )

    def prompts(self, request: DiffusionRequest) -> Prompts:
        refuse_unsupported(request, accepts=ACCEPTS)
        params = request.params
        length = params.max_sequence_length or self._default_max_sequence_length
        with as_invalid_request():
            self._pipe.check_inputs(
                params.prompt,
                None,
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
        pipe = self._pipe
        texts = [prompt.text for prompt in prompts]
        max_sequence_length = prompts[0].max_sequence_length
        embeds, pooled, _ = pipe.encode_prompt(
            texts, device=self.device, max_sequence_length=max_sequence_length
        )  # (texts, tokens, width), (texts, pooled width)
        limits = [
            TextLimit("the CLIP text encoder", pipe.tokenizer, pipe.tokenizer_max_length),
            TextLimit("the T5 text encoder", pipe.tokenizer_2, max_sequence_length),
        ]
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
        channels = pipe.transformer.config.in_channels // PATCH**2
        latents, _ = pipe.prepare_latents(1, channels, params.height, params.width, dtype, self.device, generator)
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
        layout = input_batch.once("layout", lambda: self._layout(input_batch))
        noise_pred = self._pipe.transformer(
            hidden_states=latents,
            timestep=input_batch.timesteps.to(latents.dtype) / 1000,
            guidance=layout.guidance,
            pooled_projections=input_batch.pooled_embeds,
            encoder_hidden_states=input_batch.prompt_embeds,
            txt_ids=layout.txt_ids,
            img_ids=layout.img_ids,
            joint_attention_kwargs=layout.attention,
            return_dict=False,
        )[0]
        return input_batch.split(guide(input_batch, noise_pred))

    def step_scheduler(
        self, states: Sequence[DiffusionRequestState], noise_preds: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | Exception]:
        return solve(states, noise_preds)

    def post_decode(self, state: DiffusionRequestState) -> Image.Image:
        pipe, params = self._pipe, state.request.params
        vae = pipe.vae
        latents = pipe._unpack_latents(state.latents, params.height, params.width, pipe.vae_scale_factor)
        latents = (latents / vae.config.scaling_factor) + vae.config.shift_factor
        decoded = vae.decode(latents, return_dict=False)[0]
        require_finite(decoded)
        image: Image.Image = pipe.image_processor.postprocess(decoded, output_type="pil")[0]
        return image

    @functools.cached_property
    def _schedulers(self) -> tuple[str, ...]:
        return offered_schedulers(self._pipe.scheduler, self._set_timesteps)

    def _set_timesteps(self, scheduler: Any, params: SamplingParams, image_tokens: int = 4096) -> torch.Tensor:
        steps = params.num_inference_steps
        mu = resolution_shift(scheduler, image_tokens)
        sigmas = np.linspace(1.0, 1 / steps, steps)
        return set_timesteps(scheduler, params, self.device, sigmas=sigmas, unless_flow_sigmas=True, mu=mu)

    def _true_cfg_scale(self, params: SamplingParams) -> float:
        return self._default_true_cfg_scale if params.true_cfg_scale is None else params.true_cfg_scale

    def _warnings(self, params: SamplingParams) -> tuple[str, ...]:
        if self._pipe.transformer.config.guidance_embeds or params.guidance_scale == self._default_guidance_scale:
            return ()
        return ("guidance_scale has no effect: this model is guided by true_cfg_scale, with a negative_prompt",)

    def _layout(self, batch: StepInputBatch) -> _Layout:
        pipe, dtype = self._pipe, batch.prompt_embeds.dtype
        grids = [self._grid(state.request.params) for state in batch.row_states]
        ids = {grid: pipe._prepare_latent_image_ids(1, *grid, self.device, dtype) for grid in set(grids)}
        txt_ids = torch.zeros((batch.prompt_embeds.shape[1], 3), dtype=dtype, device=self.device)
        guidance = None
        if pipe.transformer.config.guidance_embeds:
            scales = [state.request.params.guidance_scale for state in batch.row_states]
            guidance = torch.tensor(scales, dtype=torch.float32, device=self.device)
        return _Layout(
            txt_ids=txt_ids,
            img_ids=max(ids.values(), key=len),
            guidance=guidance,
            attention=attention_arguments(batch, pipe.transformer.pos_embed, txt_ids, [ids[grid] for grid in grids]),
        )

    def _grid(self, params: SamplingParams) -> tuple[int, int]:
        """Height and width in image tokens."""
        side = self._pipe.vae_scale_factor * PATCH
        return params.height // side, params.width // side
