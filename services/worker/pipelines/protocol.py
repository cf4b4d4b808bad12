"""What the worker asks of a model family: `StepPipeline`.

Role: the interface between the runner and the files beside this one. It imports no diffusers.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from msgspec import Struct
from PIL import Image

from common.messages import ModelProfile
from common.params import DiffusionRequest
from services.worker.input_batch import StepInputBatch
from services.worker.state import Conditioning, DiffusionRequestState, EncodedPrompt, PromptText


class ServingDefaults(Struct, frozen=True, forbid_unknown_fields=True):
    """`stepweave.json` beside a checkpoint's `model_index.json`: what to serve it with. Every field is optional.

    Without it, the defaults are those of the diffusers pipeline's own call.
    """

    default_num_inference_steps: int | None = None
    default_guidance_scale: float | None = None
    max_side: int | None = None  # pixels
    default_max_sequence_length: int | None = None  # text tokens, where the call has such a parameter
    default_num_frames: int | None = None  # of a video, where the call draws any


class Prompts(NamedTuple):
    """The texts that steer a request."""

    cond: PromptText
    uncond: PromptText | None  # None: no classifier-free guidance


class Video(NamedTuple):
    """A finished video."""

    frames: list[Image.Image]  # of one size
    frames_per_second: int


class StepPipeline(Protocol):
    """A model that can be run one denoise step at a time, on a batch whose members stand at different steps.

    All but `denoise_step` and `step_scheduler` run beside the denoise loop, in one other thread and on another stream.
    They may raise `RequestError`; any other exception ends the request as `generation_failed`.
    """

    device: torch.device
    mixes: tuple[str, ...]  # what may differ within a group, see `ModelProfile`
    heeds_prompt_mask: bool  # False: only prompts of equal length may share a forward, padding would change them

    def profile(self, model: str, max_num_inference_steps: int) -> ModelProfile:
        """What gateway and scheduler must know of it, under the name `model`."""
        ...

    def prompts(self, request: DiffusionRequest) -> Prompts:
        """The texts to encode for a new request. Refuses what the model can't do, before anything is computed."""
        ...

    def encode_prompts(self, prompts: Sequence[PromptText]) -> list[EncodedPrompt]:
        """All texts in one call of the text encoders. They agree in `max_sequence_length`, and no two are equal."""
        ...

    def prepare_encode(
        self, request: DiffusionRequest, cond: Conditioning, uncond: Conditioning | None
    ) -> DiffusionRequestState:
        """Timesteps, solver and initial latents of a new request, whose texts are encoded."""
        ...

    def denoise_step(self, input_batch: StepInputBatch) -> Sequence[torch.Tensor]:
        """One forward pass: a prediction for each request, after guidance, of its latents' own shape (1, …)."""
        ...

    def step_scheduler(
        self, states: Sequence[DiffusionRequestState], noise_preds: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | Exception]:
        """One solver step of each request: its new latents, or why its solver failed; the states' own stay."""
        ...

    def post_decode(self, state: DiffusionRequestState) -> Image.Image | Video:
        """The finished picture or, of several frames, the video. Raises `RequestError` `non_finite` rather than return
        a black one."""
        ...
