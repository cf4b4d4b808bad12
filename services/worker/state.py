"""What a worker keeps of one request: `DiffusionRequestState`, and of one text: `EncodedPrompt`.

Role: the persistent tensors and solver of a request, from its preparation to its decode. Records only: who changes them
and when is the business of the runner (latents, step_index) and of the side executor (everything else).
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from common.params import DiffusionRequest
from services.worker.streams import Event


@dataclass(frozen=True, slots=True)
class PromptText:
    """One text, and all else that its embedding depends on: texts with equal fields are encoded once."""

    text: str | None  # None: no negative prompt was given, where the family does not treat that like an empty one
    max_sequence_length: int | None = None  # text tokens, where the family has such a choice


@dataclass(frozen=True, slots=True)
class Conditioning:
    """What steers one row of a forward pass. On the pipeline's device; shared by all requests with the same text."""

    prompt_embeds: torch.Tensor  # (1, tokens, width)
    prompt_mask: torch.Tensor | None = None  # (1, tokens) bool, True where a token counts; None: all of them
    pooled_embeds: torch.Tensor | None = None  # (1, width)

    def tensors(self) -> list[torch.Tensor]:
        parts = (self.prompt_embeds, self.prompt_mask, self.pooled_embeds)
        return [part for part in parts if part is not None]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """What became of a text."""

    conditioning: Conditioning
    cuts: tuple[str, ...] = ()  # for the client, where an encoder dropped its end: sentences that lack their subject


@dataclass(slots=True)
class Timings:
    """Seconds that a request spent in each stage here."""

    encode_s: float = 0.0
    denoise_s: float = 0.0  # first step's start to last step's end
    decode_s: float = 0.0
    image_s: float = 0.0
    first_step_at: float | None = None  # on the clock of `time.perf_counter`


@dataclass(slots=True, eq=False)
class DiffusionRequestState:
    """One request on this worker. Compared by identity: a later attempt is another state."""

    request: DiffusionRequest
    cond: Conditioning
    uncond: Conditioning | None  # None: no classifier-free guidance, the request is one row
    guidance_scale: float  # of classifier-free guidance
    # (1, channels, [frames,] height, width) in latent pixels, or (1, image tokens, channels) where the model packs
    # them; on the device; replaced at each step.
    latents: torch.Tensor
    timesteps: torch.Tensor  # (total_steps,) on the device, as the solver made them
    scheduler: Any  # this request's own diffusers solver
    generator: torch.Generator  # this request's own, on the CPU
    image_tokens: int  # of one row
    extra_step_kwargs: dict[str, Any] = field(default_factory=dict)  # what the solver's `step` also wants
    scales_model_input: bool = False  # the pipeline passes latents through the solver's `scale_model_input`
    attempt: int = 1
    step_index: int = 0  # denoise steps behind it
    warnings: tuple[str, ...] = ()  # for the client: what was not done as asked
    timings: Timings = field(default_factory=Timings)
    ready: Event | None = None  # on CUDA: work of another stream that must end before the tensors are used
    # `timesteps` on the CPU, so that a solver's look-up doesn't wait for the device
    host_timesteps: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.host_timesteps = self.timesteps.cpu()

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def total_steps(self) -> int:
        """Denoise steps in all; some solvers make more of them than num_inference_steps."""
        return len(self.host_timesteps)

    @property
    def rows(self) -> int:
        return 1 if self.uncond is None else 2

    def model_input(self) -> torch.Tensor:
        """The latents as the denoiser wants them at this step. Calling it again changes nothing."""
        if self.scales_model_input:
            scaled: torch.Tensor = self.scheduler.scale_model_input(self.latents, self.host_timesteps[self.step_index])
            return scaled
        return self.latents

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor on the device, for a stream that takes the state over."""
        uncond = [] if self.uncond is None else self.uncond.tensors()
        return [self.latents, self.timesteps, *self.cond.tensors(), *uncond]
