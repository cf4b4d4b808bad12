"""What the worker asks of a model family: `StepPipeline`.

Role: the interface between the runner and the files beside this one. It imports no diffusers.
"""

from typing import Protocol

import torch
from msgspec import Struct
from PIL import Image

from common.messages import ModelProfile
from common.params import DiffusionRequest
from services.worker.input_batch import StepInputBatch
from services.worker.state import DiffusionRequestState


class ServingDefaults(Struct, frozen=True, forbid_unknown_fields=True):
    """`stepweave.json` beside a checkpoint's `model_index.json`: what to serve it with. Every field is optional.

    Without it, the defaults are those of the diffusers pipeline's own call.
    """

    default_num_inference_steps: int | None = None
    default_guidance_scale: float | None = None
    max_side: int | None = None  # pixels
    default_max_sequence_length: int | None = None  # text tokens, where the call has such a parameter


class StepPipeline(Protocol):
    """A model that can be run one denoise step at a time, on a batch whose members stand at different steps.

    `prepare_encode` and `post_decode` run beside the denoise loop, in another thread and on another stream.
    They may raise `RequestError`; any other exception ends the request as `generation_failed`.
    """

    device: torch.device
    mixes: tuple[str, ...]  # what may differ within a group, see `ModelProfile`
    heeds_prompt_mask: bool  # False: only prompts of equal length may share a forward, padding would change them

    def profile(self, model: str, max_num_inference_steps: int) -> ModelProfile:
        """What gateway and scheduler must know of it, under the name `model`."""
        ...

    def prepare_encode(self, request: DiffusionRequest) -> DiffusionRequestState:
        """Prompt embeddings, timesteps and initial latents of a new request."""
        ...

    def denoise_step(self, input_batch: StepInputBatch) -> torch.Tensor:
        """One forward pass. Returns (requests, …): one prediction for each request, after guidance."""
        ...

    def step_scheduler(self, state: DiffusionRequestState, noise_pred: torch.Tensor) -> torch.Tensor:
        """The request's solver step. `noise_pred` is (1, …). Returns the new latents; the state's own stay."""
        ...

    def post_decode(self, state: DiffusionRequestState) -> Image.Image:
        """The finished picture. Raises `RequestError` `non_finite` rather than return a black one."""
        ...
