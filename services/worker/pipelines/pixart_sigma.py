"""PixArt-Sigma (`PixArtSigmaPipeline`): a transformer, a T5 text encoder whose padding is masked.

Role: the diffusers pipeline in four steps. Text cleaning and encoding, latents, timesteps and the resize after the
decode are its own code; a request run here equals the pipeline called alone with
`generator=torch.Generator("cpu").manual_seed(seed)`.

The model draws a few dozen sizes only, all of about the area that it was trained on. The call maps the size asked for
to the one nearest in shape, and scales and crops the picture afterwards (`use_resolution_binning`, on by default). So
it is here too, and where that changes anything the client is told.

A text is padded to its `max_sequence_length` under a mask, so requests of other lengths share a forward. The padding is
not cut off: it changes nothing in float32, but with it a half-precision picture has the rounding of the call, too.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import PixArtSigmaPipeline
from diffusers.pipelines.pixart_alpha.pipeline_pixart_alpha import (
    ASPECT_RATIO_256_BIN,
    ASPECT_RATIO_512_BIN,
    ASPECT_RATIO_1024_BIN,
)
from diffusers.pipelines.pixart_alpha.pipeline_pixart_sigma import ASPECT_RATIO_2048_BIN
from PIL import Image

from common.errors import ConfigError, ErrorInfo, RequestError
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
from services.worker.pipelines.solvers import offered_schedulers, set_timesteps, solve, with_own_scheduler
from services.worker.state import Conditioning, DiffusionRequestState, EncodedPrompt, PromptText

ACCEPTS = ("max_sequence_length", "scheduler", "sigmas", "timesteps")
# The sizes that a model draws, by the transformer's `sample_size`, as the pipeline's call has it.
BINS = {
    32: ASPECT_RATIO_256_BIN,
    64: ASPECT_RATIO_512_BIN,
    128: ASPECT_RATIO_1024_BIN,
    256: ASPECT_RATIO_2048_BIN,
}
MAX_SEQUENCE_LENGTH = 512  # the call has no limit of its own; the models were trained with 300 tokens
CLEAN_CAPTION = call_default(PixArtSigmaPipeline, "clean_caption")  # without bs4 and ftfy it only lowers case


class PixArtSigmaStepPipeline:
    """A `StepPipeline` around a loaded `PixArtSigmaPipeline` (`Any`: its components have no static types)."""

    mixes = ("steps", "guidance", "cfg", "max_sequence_length")
    heeds_prompt_mask = True

    def __init__(self, pipe: Any, device: torch.device, defaults: ServingDefaults) -> None:
        _refuse_unsupported_transformer(pipe)
        self.device = device
        self._pipe = pipe
        self._defaults = defaults
        self._bins = BINS[pipe.transformer.config.sample_size]
        self._default_max_sequence_length: int = defaults.default_max_sequence_length or call_default(
            PixArtSigmaPipeline, "max_sequence_length"
        )

    def profile(self, model: str, max_num_inference_steps: int) -> ModelProfile:
        pipe, defaults = self._pipe, self._defaults
        config = pipe.transformer.config
        drawn = [int(side) for size in self._bins.values() for side in size]
        max_side = min(max(drawn), defaults.max_side or max(drawn))
        side = min(config.sample_size * pipe.vae_scale_factor, max_side)
        steps = defaults.default_num_inference_steps or call_default(type(pipe), "num_inference_steps")
        guidance = defaults.default_guidance_scale
        return ModelProfile(
            model=model,
            pipeline=type(pipe).__name__,
            size=SizeRule(
                multiple=1,  # of the size asked for, which need not be one that is drawn
                min_side=min(*drawn, side),  # a smaller picture would cost as much
                max_side=max_side,
                max_pixels=max_side * max_side,
                pixels_per_token=pipe.vae_scale_factor * config.patch_size,
            ),
            default_height=side,
            default_width=side,
            default_num_inference_steps=min(steps, max_num_inference_steps),
            default_guidance_scale=call_default(type(pipe), "guidance_scale") if guidance is None else guidance,
            max_num_inference_steps=max_num_inference_steps,
            mixes=self.mixes,
            accepts=ACCEPTS,
            default_max_sequence_length=self._default_max_sequence_length,
            max_sequence_length_limit=max(MAX_SEQUENCE_LENGTH, self._default_max_sequence_length),
            schedulers=self._schedulers,
        )

    def prompts(self, request: DiffusionRequest) -> Prompts:
        refuse_unsupported(request, accepts=ACCEPTS)
        params = request.params
        height, width = self._drawn_size(params)
        negative_prompt = params.negative_prompt or ""
        with as_invalid_request():
            self._pipe.check_inputs(params.prompt, height, width, negative_prompt, callback_steps=1)
        self._refuse_size_that_is_missed(params)
        length = params.max_sequence_length or self._default_max_sequence_length
        uncond = PromptText(negative_prompt, length) if params.guidance_scale > 1.0 else None
        return Prompts(PromptText(params.prompt, length), uncond)

    def encode_prompts(self, prompts: Sequence[PromptText]) -> list[EncodedPrompt]:
        pipe = self._pipe
        texts = [prompt.text for prompt in prompts]
        max_sequence_length = prompts[0].max_sequence_length
        embeds, mask, _, _ = pipe.encode_prompt(
            texts,
            do_classifier_free_guidance=False,
            device=self.device,
            clean_caption=CLEAN_CAPTION,  # not the default of `encode_prompt`, but that of the call
            max_sequence_length=max_sequence_length,
        )
        limit = TextLimit("the T5 text encoder", pipe.tokenizer, max_sequence_length)
        cleaned = pipe._text_preprocessing(texts, clean_caption=CLEAN_CAPTION)
        return [
            EncodedPrompt(Conditioning(row, prompt_mask=counts), cuts(text, [limit]))
            for row, counts, text in zip(embeds.split(1), mask.bool().split(1), cleaned, strict=True)
        ]

    def prepare_encode(
        self, request: DiffusionRequest, cond: Conditioning, uncond: Conditioning | None
    ) -> DiffusionRequestState:
        params = request.params
        height, width = self._drawn_size(params)
        pipe = with_own_scheduler(self._pipe, params)
        generator = torch.Generator("cpu").manual_seed(params.seed)
        dtype = cond.prompt_embeds.dtype
        timesteps = set_timesteps(pipe.scheduler, params, self.device)
        # After the timesteps: how far the solver scales the noise may depend on them.
        latents = pipe.prepare_latents(
            1, pipe.transformer.config.in_channels, height, width, dtype, self.device, generator
        )
        patch = pipe.transformer.config.patch_size
        return DiffusionRequestState(
            request=request,
            cond=cond,
            uncond=uncond,
            guidance_scale=params.guidance_scale,
            latents=latents,
            timesteps=timesteps,
            scheduler=pipe.scheduler,
            generator=generator,
            image_tokens=(latents.shape[2] // patch) * (latents.shape[3] // patch),
            extra_step_kwargs=pipe.prepare_extra_step_kwargs(generator, call_default(type(pipe), "eta")),
            scales_model_input=True,
            warnings=_resizing(params, height, width),
        )

    def denoise_step(self, input_batch: StepInputBatch) -> list[torch.Tensor]:
        transformer = self._pipe.transformer
        noise_pred = transformer(
            input_batch.latents,
            encoder_hidden_states=input_batch.prompt_embeds,
            encoder_attention_mask=input_batch.prompt_mask,
            timestep=input_batch.timesteps,
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            return_dict=False,
        )[0]
        # The other half of the channels, if there is one, is a variance that the pipeline does not use.
        return input_batch.split(guide(input_batch, noise_pred[:, : transformer.config.in_channels]))

    def step_scheduler(
        self, states: Sequence[DiffusionRequestState], noise_preds: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | Exception]:
        return solve(states, noise_preds)

    def post_decode(self, state: DiffusionRequestState) -> Image.Image:
        pipe, params = self._pipe, state.request.params
        latents = state.latents.to(pipe.vae.dtype) / pipe.vae.config.scaling_factor
        decoded = pipe.vae.decode(latents, return_dict=False)[0]
        require_finite(decoded)
        resized = pipe.image_processor.resize_and_crop_tensor(decoded, params.width, params.height)
        image: Image.Image = pipe.image_processor.postprocess(resized, output_type="pil")[0]
        return image

    @functools.cached_property
    def _schedulers(self) -> tuple[str, ...]:
        return offered_schedulers(self._pipe.scheduler)

    def _drawn_size(self, params: SamplingParams) -> tuple[int, int]:
        """Height and width, in pixels, of the picture that is denoised and decoded."""
        height, width = self._pipe.image_processor.classify_height_width_bin(params.height, params.width, self._bins)
        return height, width

    def _refuse_size_that_is_missed(self, params: SamplingParams) -> None:
        """For about one size in fifty the resize rounds a side down below what was asked for, and leaves almost nothing
        of the picture. It is tried here, on a tensor without data."""
        height, width = self._drawn_size(params)
        drawn = torch.empty(1, 1, height, width, device="meta")
        resized = self._pipe.image_processor.resize_and_crop_tensor(drawn, params.width, params.height)
        if resized.shape[2:] != (params.height, params.width):
            message = (
                f"the model draws {width}x{height} for {params.width}x{params.height}, and diffusers can't scale one "
                f"to the other; {width}x{height} itself can be had, or a size a few pixels off"
            )
            raise RequestError(ErrorInfo("invalid_request", message, "size"))


def _resizing(params: SamplingParams, height: int, width: int) -> tuple[str, ...]:
    if (height, width) == (params.height, params.width):
        return ()
    return (
        f"size {params.width}x{params.height} is not one that the model draws: the picture was drawn at "
        f"{width}x{height}, then scaled and cropped",
    )


def _refuse_unsupported_transformer(pipe: Any) -> None:
    """Raises `ConfigError` for a checkpoint that the diffusers pipeline itself can't draw with."""
    config, channels = pipe.transformer.config, pipe.vae.config.latent_channels
    reason = None
    if config.sample_size not in BINS:
        known = ", ".join(map(str, BINS))
        reason = f"its transformer's sample_size is {config.sample_size}, and sizes are known for {known} only"
    elif pipe.transformer.use_additional_conditions:
        reason = "its transformer takes resolution and aspect ratio as inputs (use_additional_conditions)"
    elif config.in_channels != channels:
        reason = f"its transformer takes {config.in_channels} channels and its VAE {channels}"
    elif config.out_channels not in (channels, 2 * channels):
        reason = f"its transformer's out_channels is {config.out_channels}, which is neither {channels} nor twice that"
    if reason is not None:
        raise ConfigError(f"this PixArtSigmaPipeline checkpoint can't be served: {reason}")
