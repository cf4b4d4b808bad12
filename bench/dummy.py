"""A made-up model family whose step takes a given time: what is left of a measurement is Stepweave's own.

Role: a `StepPipeline`. A denoise step sleeps, which releases the interpreter lock as a wait for a device does. Encoding
and decoding, where they are given a time, are torch operations back to back, each of which gives the lock up and wants
it again, as real ones do. The solver is a real one, so a request's state is like any other's.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image

from bench.recording import Durations
from common.messages import ModelProfile, SizeRule
from common.params import DiffusionRequest
from services.worker.input_batch import StepInputBatch, guide
from services.worker.pipelines.protocol import Prompts
from services.worker.pipelines.solvers import solve
from services.worker.state import Conditioning, DiffusionRequestState, EncodedPrompt, PromptText

SIDE = 64  # pixels
PIXELS_PER_TOKEN = 8
CHANNELS = 4
TOKENS, WIDTH = 16, 32  # of the prompt embeddings


class DummyPipeline:
    """Draws one grey picture, in a given time. Its requests are one row each unless they ask for guidance."""

    device = torch.device("cpu")
    mixes = ("steps",)
    heeds_prompt_mask = False

    def __init__(self, durations: Durations) -> None:
        self._durations = durations

    def profile(self, model: str, max_num_inference_steps: int) -> ModelProfile:
        return ModelProfile(
            model=model,
            pipeline=type(self).__name__,
            size=SizeRule(
                multiple=8, min_side=16, max_side=1024, max_pixels=1024 * 1024, pixels_per_token=PIXELS_PER_TOKEN
            ),
            default_height=SIDE,
            default_width=SIDE,
            default_num_inference_steps=min(20, max_num_inference_steps),
            default_guidance_scale=1.0,
            max_num_inference_steps=max_num_inference_steps,
            mixes=self.mixes,
        )

    def prompts(self, request: DiffusionRequest) -> Prompts:
        params = request.params
        return Prompts(PromptText(params.prompt), PromptText("") if params.guidance_scale > 1 else None)

    def encode_prompts(self, prompts: Sequence[PromptText]) -> list[EncodedPrompt]:
        return [EncodedPrompt(Conditioning(torch.zeros(1, TOKENS, WIDTH))) for _ in prompts]

    def prepare_encode(
        self, request: DiffusionRequest, cond: Conditioning, uncond: Conditioning | None
    ) -> DiffusionRequestState:
        _work(self._durations.encode_s)  # of every request, however often its text was seen
        params = request.params
        solver: Any = FlowMatchEulerDiscreteScheduler()  # type: ignore[no-untyped-call]
        solver.set_timesteps(params.num_inference_steps)
        solver.set_begin_index(0)
        generator = torch.Generator("cpu").manual_seed(params.seed)
        height, width = params.height // PIXELS_PER_TOKEN, params.width // PIXELS_PER_TOKEN
        return DiffusionRequestState(
            request=request,
            cond=cond,
            uncond=uncond,
            guidance_scale=params.guidance_scale,
            latents=torch.randn(1, CHANNELS, height, width, generator=generator),
            timesteps=solver.timesteps,
            scheduler=solver,
            generator=generator,
            image_tokens=height * width,
        )

    def denoise_step(self, input_batch: StepInputBatch) -> list[torch.Tensor]:
        time.sleep(self._durations.step_s)
        assert isinstance(input_batch.latents, torch.Tensor)  # sizes are not mixed
        return input_batch.split(guide(input_batch, torch.zeros_like(input_batch.latents)))

    def step_scheduler(
        self, states: Sequence[DiffusionRequestState], noise_preds: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | Exception]:
        return solve(states, noise_preds)

    def post_decode(self, state: DiffusionRequestState) -> Image.Image:
        _work(self._durations.decode_s)
        return Image.new("RGB", (state.request.params.width, state.request.params.height), "grey")


def _work(seconds: float) -> None:
    end = time.perf_counter() + seconds
    matrix = torch.ones(96, 96)
    while time.perf_counter() < end:
        torch.mm(matrix, matrix)
