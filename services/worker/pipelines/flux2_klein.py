"""FLUX.2 klein (`Flux2KleinPipeline`): a transformer over text and image tokens, a language model as text encoder.

Role: the diffusers pipeline in four steps. Preparation, latents, timesteps and decode are its own code; a request run
here equals the pipeline called alone with `generator=torch.Generator("cpu").manual_seed(seed)`.

Classifier-free guidance is `guidance_scale`, which has no effect on a distilled checkpoint (`is_distilled`). The call
guides away from an empty text, or from another one if it is given that one's embedding, as is done here.

The text is always padded to its limit, and the transformer does not mask the padding: it is part of the result. So
prompts of another `max_sequence_length` can't share a forward. Pictures of other sizes can: latents are sequences of
image tokens, those that are added to make rows equally long are masked, and each row has its own rotary table
(`flux_attention.py`).
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
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
    set_timesteps,
    solve,
    step_arguments,
    with_own_scheduler,
)
from services.worker.state import Conditioning, DiffusionRequestState, EncodedPrompt, PromptText

ACCEPTS = ("max_sequence_length", "scheduler", "sigmas")
PATCH = 2  # the pipeline packs 2 x 2 latent pixels into one token
MAX_SIDE = 2048  # pixels; the model has no limit of its own, but what it was trained on ends there


class _Layout(NamedTuple):
    """What the transformer is told of a batch beside its rows' tensors, the same at each step."""

    txt_ids: torch.Tensor  # (text tokens, 4)
    img_ids: torch.Tensor  # (image tokens, 4), of the largest picture; of no effect where each row has its own table
    attention: dict[str, Any]


class Flux2KleinStepPipeline:
    """A `StepPipeline` around a loaded `Flux2KleinPipeline` (`Any`: its components have no static types)."""

    mixes = ("steps", "guidance", "cfg", "resolution")
    heeds_prompt_mask = False

    def __init__(self, pipe: Any, device: torch.device, defaults: ServingDefaults) -> None:
        take_row_rotary(pipe.transformer)
        self.device = device
        self._pipe = pipe
        self._defaults = defaults
        # At which guidance_scale guidance begins: a distilled model has none, whatever it is.
        self._cfg = CfgRule(scale_field="guidance_scale", threshold=math.inf if pipe.config.is_distilled else 1.0)
        self._default_max_sequence_length: int = defaults.default_max_sequence_length or call_default(
            type(pipe), "max_sequence_length"
        )
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
            cfg=self._cfg,
            accepts=ACCEPTS,
            default_max_sequence_length=self._default_max_sequence_length,
            max_sequence_length_limit=pipe.tokenizer_max_length,
            schedulers=self._schedulers,
        )

    def prompts(self, request: DiffusionRequest) -> Prompts:
        refuse_unsupported(request, accepts=ACCEPTS)
        params = request.params
        with as_invalid_request():
            self._pipe.check_inputs(params.prompt, params.height, params.width, guidance_scale=params.guidance_scale)
        length = params.max_sequence_length or self._default_max_sequence_length
        guided = params.guidance_scale > self._cfg.threshold
        return Prompts(
            PromptText(params.prompt, length), PromptText(params.negative_prompt or "", length) if guided else None
        )

    def encode_prompts(self, prompts: Sequence[PromptText]) -> list[EncodedPrompt]:
        texts = [prompt.text for prompt in prompts]
        max_sequence_length = prompts[0].max_sequence_length
        embeds, _ = self._pipe.encode_prompt(
            texts, device=self.device, max_sequence_length=max_sequence_length
        )  # (texts, tokens, width)
        limit = TextLimit("the text encoder", self._pipe.tokenizer, max_sequence_length)
        return [
            EncodedPrompt(Conditioning(row), cuts(self._templated(text), [limit]))
            for row, text in zip(embeds.split(1), texts, strict=True)
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
            guidance_scale=params.guidance_scale,
            latents=latents,
            timesteps=timesteps,
            scheduler=pipe.scheduler,
            generator=generator,
            image_tokens=image_tokens,
            extra_step_kwargs=step_arguments(pipe.scheduler, generator),
            warnings=self._warnings(params),
        )

    def denoise_step(self, input_batch: StepInputBatch) -> list[torch.Tensor]:
        latents, transformer = input_batch.latents, self._pipe.transformer
        assert isinstance(latents, torch.Tensor)  # packed, so they are padded and not listed
        layout = input_batch.once("layout", lambda: self._layout(input_batch))
        noise_pred = transformer(
            hidden_states=latents.to(transformer.dtype),
            timestep=input_batch.timesteps.to(latents.dtype) / 1000,
            guidance=None,
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
        pipe, vae = self._pipe, self._pipe.vae
        grid = self._grid(state.request.params)
        latents = pipe._unpack_latents_with_ids(state.latents, self._img_ids(grid)[None], *grid)
        # What is decoded are not the model's latents but those before they were normalised.
        mean = vae.bn.running_mean.view(1, -1, 1, 1).to(latents.device, latents.dtype)
        variance = vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps
        latents = pipe._unpatchify_latents(latents * torch.sqrt(variance).to(latents.device, latents.dtype) + mean)
        decoded = vae.decode(latents, return_dict=False)[0]
        require_finite(decoded)
        image: Image.Image = pipe.image_processor.postprocess(decoded, output_type="pil")[0]
        return image

    def _templated(self, text: str | None) -> str:
        """What the text encoder reads, as the pipeline writes it."""
        templated: str = self._pipe.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return templated

    @functools.cached_property
    def _schedulers(self) -> tuple[str, ...]:
        return offered_schedulers(self._pipe.scheduler, self._set_timesteps)

    def _set_timesteps(self, scheduler: Any, params: SamplingParams, image_tokens: int = 4096) -> torch.Tensor:
        steps = params.num_inference_steps
        sigmas, mu = np.linspace(1.0, 1 / steps, steps), compute_empirical_mu(image_tokens, steps)
        return set_timesteps(scheduler, params, self.device, sigmas=sigmas, unless_flow_sigmas=True, mu=mu)

    def _warnings(self, params: SamplingParams) -> tuple[str, ...]:
        if not self._pipe.config.is_distilled or params.guidance_scale == self._default_guidance_scale:
            return ()
        return ("guidance_scale has no effect: this model is distilled to do without",)

    def _layout(self, batch: StepInputBatch) -> _Layout:
        pipe = self._pipe
        grids = [self._grid(state.request.params) for state in batch.row_states]
        ids = {grid: self._img_ids(grid) for grid in set(grids)}
        txt_ids = pipe._prepare_text_ids(batch.prompt_embeds[:1])[0].to(self.device)
        return _Layout(
            txt_ids=txt_ids,
            img_ids=max(ids.values(), key=len),
            attention=attention_arguments(batch, pipe.transformer.pos_embed, txt_ids, [ids[grid] for grid in grids]),
        )

    def _grid(self, params: SamplingParams) -> tuple[int, int]:
        """Height and width in image tokens."""
        side = self._pipe.vae_scale_factor * PATCH
        return params.height // side, params.width // side

    def _img_ids(self, grid: tuple[int, int]) -> torch.Tensor:
        """(image tokens, 4) positions of a picture of that height and width."""
        ids: torch.Tensor = self._pipe._prepare_latent_ids(torch.empty((1, 1, *grid)))[0].to(self.device)
        return ids
