"""Z-Image (`ZImagePipeline`): a transformer that takes lists, so sizes and text lengths mix in one forward.

Role: the diffusers pipeline in four steps. Text encoding, latents, sigmas and decode are its own code; a request run
here equals the pipeline called alone with `generator=torch.Generator("cpu").manual_seed(seed)`.

A text is as long as its tokens, the frame of the chat template included; its padding is cut off before the transformer
sees it. The transformer pads the text and the image of each row to multiples of 32 tokens, with embeddings that it has
learnt for that, and rows to the longest, under a mask. Guidance is on above 0, so at 1 too. The call's
`cfg_normalization` and `cfg_truncation` are left at their defaults, which change nothing.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import ZImagePipeline
from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF
from diffusers.pipelines.z_image.pipeline_z_image import get_default_z_image_sigmas
from PIL import Image

from common.errors import ErrorInfo, RequestError
from common.messages import CfgRule, ModelProfile, SizeRule
from common.params import DiffusionRequest, SamplingParams
from services.worker.input_batch import StepInputBatch
from services.worker.pipelines.preparing import (
    TextLimit,
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

DEFAULT_SIDE = 1024  # pixels, what the call draws if it is not told
MAX_SIDE = 2048  # the released model's position table goes on to 8192
ACCEPTS = ("max_sequence_length", "scheduler", "sigmas")
CFG = CfgRule(threshold=0.0)


class ZImageStepPipeline:
    """A `StepPipeline` around a loaded `ZImagePipeline` (`Any`: its components have no static types)."""

    mixes = ("steps", "guidance", "cfg", "resolution", "max_sequence_length")
    heeds_prompt_mask = True

    def __init__(self, pipe: Any, device: torch.device, defaults: ServingDefaults) -> None:
        self.device = device
        self._pipe = pipe
        self._defaults = defaults
        self._multiple: int = pipe.vae_scale_factor * 2  # pixels; one image token covers this square
        # Positions: the text's padded tokens from 1 on, then one for the image, all below the table's length.
        table: int = pipe.transformer.config.axes_lens[0]
        self._max_sequence_length_limit = (table - 2) // SEQ_MULTI_OF * SEQ_MULTI_OF
        self._default_max_sequence_length = min(
            defaults.default_max_sequence_length or call_default(ZImagePipeline, "max_sequence_length"),
            self._max_sequence_length_limit,
        )

    def profile(self, model: str, max_num_inference_steps: int) -> ModelProfile:
        pipe, defaults, multiple = self._pipe, self._defaults, self._multiple
        limit = min(pipe.transformer.config.axes_lens[1:]) * multiple  # as many image tokens as the table has positions
        max_side = min(limit, defaults.max_side or MAX_SIDE) // multiple * multiple
        side = min(DEFAULT_SIDE, max_side) // multiple * multiple
        steps = defaults.default_num_inference_steps or call_default(type(pipe), "num_inference_steps")
        guidance = defaults.default_guidance_scale
        return ModelProfile(
            model=model,
            pipeline=type(pipe).__name__,
            size=SizeRule(
                multiple=multiple,
                min_side=multiple,
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
            cfg=CFG,
            accepts=ACCEPTS,
            default_max_sequence_length=self._default_max_sequence_length,
            max_sequence_length_limit=self._max_sequence_length_limit,
            schedulers=self._schedulers,
        )

    def prompts(self, request: DiffusionRequest) -> Prompts:
        refuse_unsupported(request, accepts=ACCEPTS)
        params = request.params
        self._refuse_odd_size(params)
        length = params.max_sequence_length or self._default_max_sequence_length
        guided = params.guidance_scale > CFG.threshold
        return Prompts(
            PromptText(params.prompt, length), PromptText(params.negative_prompt or "", length) if guided else None
        )

    def encode_prompts(self, prompts: Sequence[PromptText]) -> list[EncodedPrompt]:
        tokenizer = self._pipe.tokenizer
        texts = [prompt.text for prompt in prompts]
        max_sequence_length = prompts[0].max_sequence_length
        embeds, _ = self._pipe.encode_prompt(
            list(texts),  # it overwrites the list that it is given
            self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
        )
        limit = TextLimit("the text encoder", tokenizer, max_sequence_length)
        return [
            EncodedPrompt(Conditioning(row[None]), cuts(_framed(tokenizer, text), [limit]))
            for row, text in zip(embeds, texts, strict=True)
        ]

    def prepare_encode(
        self, request: DiffusionRequest, cond: Conditioning, uncond: Conditioning | None
    ) -> DiffusionRequestState:
        params = request.params
        pipe = with_own_scheduler(self._pipe, params)
        generator = torch.Generator("cpu").manual_seed(params.seed)
        channels = pipe.transformer.in_channels
        latents = pipe.prepare_latents(1, channels, params.height, params.width, torch.float32, self.device, generator)
        image_tokens = (latents.shape[2] // 2) * (latents.shape[3] // 2)
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
        )

    def denoise_step(self, input_batch: StepInputBatch) -> list[torch.Tensor]:
        transformer = self._pipe.transformer
        rows = transformer(
            [latents.to(transformer.dtype).unsqueeze(1) for latents in input_batch.latents],  # a picture is one frame
            (1000 - input_batch.timesteps) / 1000,
            _captions(input_batch),
            return_dict=False,
        )[0]
        # What it predicts points from noise to picture, while solvers go the other way.
        return [-noise_pred.squeeze(1)[None] for noise_pred in _guide(input_batch, rows)]

    def step_scheduler(
        self, states: Sequence[DiffusionRequestState], noise_preds: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | Exception]:
        return solve(states, noise_preds)

    def post_decode(self, state: DiffusionRequestState) -> Image.Image:
        vae = self._pipe.vae
        latents = (state.latents.to(vae.dtype) / vae.config.scaling_factor) + vae.config.shift_factor
        decoded = vae.decode(latents, return_dict=False)[0]
        require_finite(decoded)
        image: Image.Image = self._pipe.image_processor.postprocess(decoded, output_type="pil")[0]
        return image

    @functools.cached_property
    def _schedulers(self) -> tuple[str, ...]:
        return offered_schedulers(self._pipe.scheduler, self._set_timesteps)

    def _set_timesteps(self, scheduler: Any, params: SamplingParams, image_tokens: int = 4096) -> torch.Tensor:
        """The call gives every solver a shift for the size; only one with `use_dynamic_shifting` heeds it."""
        mu = resolution_shift(scheduler, image_tokens)
        sigmas = get_default_z_image_sigmas(params.num_inference_steps)
        return set_timesteps(scheduler, params, self.device, sigmas=sigmas, mu=mu)

    def _refuse_odd_size(self, params: SamplingParams) -> None:
        """The call does so too, but `prepare_latents` would round the size down."""
        for field, side in (("height", params.height), ("width", params.width)):
            if side % self._multiple:
                message = f"{field} must be a multiple of {self._multiple}, and is {side}"
                raise RequestError(ErrorInfo("invalid_request", message, field))


def _framed(tokenizer: Any, text: str) -> str:
    """The text as the pipeline has it tokenized."""
    framed: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    return framed


def _captions(batch: StepInputBatch) -> list[torch.Tensor]:
    """(tokens, width) of each row, without padding. Views: nothing is copied."""
    conditionings = [state.cond for state in batch.states]
    conditionings += [state.uncond for state in batch.guided_states if state.uncond is not None]
    lengths = [conditioning.prompt_embeds.shape[1] for conditioning in conditionings]
    return [embeds[:length] for embeds, length in zip(batch.prompt_embeds, lengths, strict=True)]


def _guide(batch: StepInputBatch, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Classifier-free guidance in float32, in the form of `ZImagePipeline`: cond + scale * (cond - uncond)."""
    conds, unconds = rows[: batch.requests], iter(rows[batch.requests :])
    guided = []
    for state, row, scale in zip(batch.states, conds, batch.guidance_scale, strict=True):
        cond = row.float()
        guided.append(cond if state.uncond is None else cond + scale * (cond - next(unconds).float()))
    return guided
