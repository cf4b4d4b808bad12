"""A made-up model family whose prompts have their own lengths and which heeds the mask, as some real ones do."""

from collections.abc import Sequence

import torch
from PIL import Image

from common.messages import ModelProfile
from common.params import DiffusionRequest
from services.worker.input_batch import StepInputBatch, guide
from services.worker.pipelines.protocol import Prompts
from services.worker.state import Conditioning, DiffusionRequestState, EncodedPrompt, PromptText
from tests import builders

WIDTH = 4


class Solver:
    """One step of Euler's method."""

    def step(self, noise_pred: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        return latents - 0.1 * noise_pred


class MaskedPipeline:
    """Draws latents towards the mean of the tokens that count. One token for each letter."""

    device = torch.device("cpu")
    mixes = ("steps",)
    heeds_prompt_mask = True

    def profile(self, model: str, max_num_inference_steps: int) -> ModelProfile:
        return builders.profile(model=model, max_num_inference_steps=max_num_inference_steps)

    def prompts(self, request: DiffusionRequest) -> Prompts:
        return Prompts(
            PromptText(request.params.prompt), PromptText("-") if request.params.guidance_scale > 1 else None
        )

    def encode_prompts(self, prompts: Sequence[PromptText]) -> list[EncodedPrompt]:
        return [EncodedPrompt(encode(str(prompt.text))) for prompt in prompts]

    def prepare_encode(
        self, request: DiffusionRequest, cond: Conditioning, uncond: Conditioning | None
    ) -> DiffusionRequestState:
        generator = torch.Generator("cpu").manual_seed(request.params.seed)
        timesteps = torch.linspace(1000, 0, request.params.num_inference_steps)
        return DiffusionRequestState(
            request=request,
            cond=cond,
            uncond=uncond,
            guidance_scale=request.params.guidance_scale,
            latents=torch.randn(1, WIDTH, 2, 2, generator=generator),
            timesteps=timesteps,
            scheduler=Solver(),
            generator=generator,
            image_tokens=4,
        )

    def denoise_step(self, input_batch: StepInputBatch) -> list[torch.Tensor]:
        assert input_batch.prompt_mask is not None
        assert isinstance(input_batch.latents, torch.Tensor)
        mask = input_batch.prompt_mask[:, :, None].float()
        text = (input_batch.prompt_embeds * mask).sum(1) / mask.sum(1)
        return input_batch.split(guide(input_batch, input_batch.latents - text[:, :, None, None]))

    def step_scheduler(
        self, states: Sequence[DiffusionRequestState], noise_preds: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | Exception]:
        pairs = zip(states, noise_preds, strict=True)
        return [state.scheduler.step(noise_pred, state.latents) for state, noise_pred in pairs]

    def post_decode(self, state: DiffusionRequestState) -> Image.Image:
        pixels = (state.latents[0, :3] * 32 + 128).clamp(0, 255).to(torch.uint8).permute(1, 2, 0).contiguous()
        return Image.fromarray(pixels.numpy())


def encode(prompt: str) -> Conditioning:
    embeds = torch.tensor([[[float(ord(letter) % 7 + place) for place in range(WIDTH)] for letter in prompt]])
    return Conditioning(embeds, torch.ones(1, len(prompt), dtype=torch.bool))
