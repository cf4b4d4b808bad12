"""Wan 2.1 and 2.2, text to video (`WanPipeline`): latents with frames, a UMT5 text encoder.

Role: the diffusers pipeline in four steps. Preparation, latents, timesteps and decode are its own code; a request run
here equals the pipeline called alone with `generator=torch.Generator("cpu").manual_seed(seed)`. A request of one frame
is a picture.

The text is always padded to `max_sequence_length` with zeros that are not masked: they are part of the result, so
prompts of another `max_sequence_length` can't share a forward. Wan 2.2 comes in two kinds more: with a second
transformer for the steps with little noise (so one step of a batch may need both), and with a timestep for each token.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import WanPipeline
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
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
from services.worker.pipelines.protocol import Prompts, ServingDefaults, Video
from services.worker.pipelines.solvers import (
    offered_schedulers,
    set_timesteps,
    solve,
    step_arguments,
    with_own_scheduler,
)
from services.worker.state import Conditioning, DiffusionRequestState, EncodedPrompt, PromptText

ACCEPTS = ("num_frames", "max_sequence_length", "scheduler")
SIZE_MULTIPLE = 16  # what the pipeline's own check_inputs asks for, whatever the VAE
MAX_SIDE = 1280  # pixels; trained up to 1280x720, its position table goes far beyond
MAX_PIXELS = 1280 * 720
MAX_NUM_FRAMES = 161  # trained on 81, and 121 with a timestep for each token
MAX_SEQUENCE_LENGTH = 512  # the context that it was trained with
# `sample_fps` of the released configs, the second of the model with a timestep for each token.
FRAMES_PER_SECOND, FRAMES_PER_SECOND_EXPANDED = 16, 24


class WanStepPipeline:
    """A `StepPipeline` around a loaded `WanPipeline` (`Any`: its components have no static types)."""

    mixes = ("steps", "guidance", "cfg")
    heeds_prompt_mask = False

    def __init__(self, pipe: Any, device: torch.device, defaults: ServingDefaults) -> None:
        _refuse_unsupported_parts(pipe)
        self.device = device
        self._pipe = pipe
        self._defaults = defaults
        self._default_max_sequence_length: int = defaults.default_max_sequence_length or call_default(
            WanPipeline, "max_sequence_length"
        )

    def profile(self, model: str, max_num_inference_steps: int) -> ModelProfile:
        pipe, defaults = self._pipe, self._defaults
        token_side = pipe.vae_scale_factor_spatial * pipe.transformer.config.patch_size[1]
        multiple = math.lcm(SIZE_MULTIPLE, token_side)
        max_side = (defaults.max_side or MAX_SIDE) // multiple * multiple
        height, width = (
            min(call_default(WanPipeline, side), max_side) // multiple * multiple for side in ("height", "width")
        )
        steps = defaults.default_num_inference_steps or call_default(WanPipeline, "num_inference_steps")
        guidance = defaults.default_guidance_scale
        return ModelProfile(
            model=model,
            pipeline=type(pipe).__name__,
            size=SizeRule(
                multiple=multiple,
                min_side=multiple,
                max_side=max_side,
                max_pixels=min(max_side * max_side, MAX_PIXELS),
                pixels_per_token=token_side,
                frames_per_token=pipe.vae_scale_factor_temporal,
            ),
            default_height=height,
            default_width=width,
            default_num_inference_steps=min(steps, max_num_inference_steps),
            default_guidance_scale=call_default(WanPipeline, "guidance_scale") if guidance is None else guidance,
            max_num_inference_steps=max_num_inference_steps,
            mixes=self.mixes,
            accepts=ACCEPTS,
            default_num_frames=defaults.default_num_frames or call_default(WanPipeline, "num_frames"),
            max_num_frames=MAX_NUM_FRAMES,
            default_max_sequence_length=self._default_max_sequence_length,
            max_sequence_length_limit=MAX_SEQUENCE_LENGTH,
            schedulers=self._schedulers,
        )

    def prompts(self, request: DiffusionRequest) -> Prompts:
        refuse_unsupported(request, ACCEPTS)
        params = request.params
        with as_invalid_request():
            self._pipe.check_inputs(params.prompt, params.negative_prompt, params.height, params.width)
        self._refuse_what_would_be_rounded(request)
        length = params.max_sequence_length or self._default_max_sequence_length
        uncond = PromptText(params.negative_prompt or "", length) if params.guidance_scale > 1.0 else None
        return Prompts(PromptText(params.prompt, length), uncond)

    def encode_prompts(self, prompts: Sequence[PromptText]) -> list[EncodedPrompt]:
        pipe = self._pipe
        texts = [prompt.text or "" for prompt in prompts]
        max_sequence_length = prompts[0].max_sequence_length
        embeds, _ = pipe.encode_prompt(
            texts, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length, device=self.device
        )
        limit = TextLimit("the text encoder", pipe.tokenizer, max_sequence_length)
        return [
            EncodedPrompt(Conditioning(row), cuts(prompt_clean(text), [limit]))
            for row, text in zip(embeds.to(pipe.transformer.dtype).split(1), texts, strict=True)
        ]

    def prepare_encode(
        self, request: DiffusionRequest, cond: Conditioning, uncond: Conditioning | None
    ) -> DiffusionRequestState:
        params = request.params
        pipe = with_own_scheduler(self._pipe, params)
        generator = torch.Generator("cpu").manual_seed(params.seed)
        timesteps = set_timesteps(pipe.scheduler, params, self.device)
        latents = pipe.prepare_latents(
            1,
            pipe.transformer.config.in_channels,
            params.height,
            params.width,
            params.num_frames,
            torch.float32,
            self.device,
            generator,
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
            image_tokens=self._image_tokens(latents),
            extra_step_kwargs=step_arguments(pipe.scheduler, generator),
        )

    def denoise_step(self, input_batch: StepInputBatch) -> list[torch.Tensor]:
        assert isinstance(input_batch.latents, torch.Tensor)  # sizes are not mixed
        inputs = (input_batch.latents, input_batch.timesteps, input_batch.prompt_embeds)
        rows_of: dict[Any, list[int]] = {}  # the transformers of this step, nearly always one
        for row, state in enumerate(input_batch.row_states):
            rows_of.setdefault(self._transformer_of(state), []).append(row)
        noise_preds: dict[int, torch.Tensor] = {}
        for transformer, rows in rows_of.items():
            alone = len(rows_of) == 1
            chosen = inputs if alone else [torch.cat([part[row : row + 1] for row in rows]) for part in inputs]
            noise_preds |= zip(rows, self._predict(transformer, *chosen).split(1), strict=True)
        return input_batch.split(guide(input_batch, torch.cat([noise_preds[row] for row in range(input_batch.rows)])))

    def step_scheduler(
        self, states: Sequence[DiffusionRequestState], noise_preds: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | Exception]:
        return solve(states, noise_preds)

    def post_decode(self, state: DiffusionRequestState) -> Image.Image | Video:
        pipe, vae = self._pipe, self._pipe.vae
        latents = state.latents.to(vae.dtype)
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1).to(latents.device, latents.dtype)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        # The pipeline divides by the reciprocal, which is not quite a product.
        latents = latents / (1.0 / std) + mean
        require_finite(latents)  # what the decoder returns is clamped
        decoded = vae.decode(latents, return_dict=False)[0]
        require_finite(decoded)
        frames: list[Image.Image] = pipe.video_processor.postprocess_video(decoded, output_type="pil")[0]
        if state.request.params.num_frames == 1:
            return frames[0]
        return Video(frames, FRAMES_PER_SECOND_EXPANDED if pipe.config.expand_timesteps else FRAMES_PER_SECOND)

    @functools.cached_property
    def _schedulers(self) -> tuple[str, ...]:
        return offered_schedulers(self._pipe.scheduler)

    def _predict(
        self, transformer: Any, latents: torch.Tensor, timesteps: torch.Tensor, prompt_embeds: torch.Tensor
    ) -> torch.Tensor:
        """(rows, …) predictions. Latents stay in float32 whatever the type of the transformer."""
        if self._pipe.config.expand_timesteps:
            tokens = latents[0, 0, :, ::2, ::2].numel()
            timesteps = timesteps[:, None].expand(-1, tokens)
        noise_pred: torch.Tensor = transformer(
            hidden_states=latents.to(self._pipe.transformer.dtype),
            timestep=timesteps,
            encoder_hidden_states=prompt_embeds,
            return_dict=False,
        )[0]
        return noise_pred

    def _transformer_of(self, state: DiffusionRequestState) -> Any:
        """The one that denoises the state's next step."""
        pipe = self._pipe
        boundary_ratio = pipe.config.boundary_ratio
        if boundary_ratio is None:
            return pipe.transformer
        boundary = boundary_ratio * state.scheduler.config.num_train_timesteps
        return pipe.transformer if state.host_timesteps[state.step_index] >= boundary else pipe.transformer_2

    def _image_tokens(self, latents: torch.Tensor) -> int:
        patch = self._pipe.transformer.config.patch_size
        return math.prod(size // side for size, side in zip(latents.shape[2:], patch, strict=True))

    def _refuse_what_would_be_rounded(self, request: DiffusionRequest) -> None:
        """The call rounds a size or a number of frames that it can't make, with a warning in its log."""
        pipe, params = self._pipe, request.params
        token_side = pipe.vae_scale_factor_spatial * pipe.transformer.config.patch_size[1]
        for field, side in (("height", params.height), ("width", params.width)):
            if side % token_side:
                message = f"{field} must be a multiple of {token_side}, and is {side}"
                raise RequestError(ErrorInfo("invalid_request", message, field))
        factor = pipe.vae_scale_factor_temporal
        if params.num_frames < 1 or (params.num_frames - 1) % factor:
            message = f"num_frames must be one more than a multiple of {factor}, and is {params.num_frames}"
            raise RequestError(ErrorInfo("invalid_request", message, "num_frames"))


def _refuse_unsupported_parts(pipe: Any) -> None:
    """Raises `ConfigError` for a checkpoint whose parts the diffusers pipeline itself could not draw with."""
    if pipe.transformer is None:
        raise ConfigError("the checkpoint has no transformer for the steps with much noise, so it can't start a video")
    if pipe.config.boundary_ratio is not None and pipe.transformer_2 is None:
        raise ConfigError(
            f"the checkpoint has a boundary_ratio ({pipe.config.boundary_ratio:g}), below which transformer_2 takes "
            "over, but no transformer_2"
        )
    if pipe.transformer.config.image_dim is not None:
        raise ConfigError("the checkpoint's transformer is one of image to video: it needs a picture to begin with")
