"""Z-Image's own: lists of sizes and text lengths in one forward, guidance that is on at 1, and texts in a frame."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from PIL import Image

from common.errors import RequestError
from common.params import DiffusionRequest
from common.rows import uses_cfg
from services.worker.input_batch import StepInputBatch
from services.worker.pipelines.protocol import ServingDefaults, StepPipeline
from services.worker.pipelines.z_image import ZImageStepPipeline
from services.worker.state import PromptText
from tests.worker.driving import LONG, Wrapped, draw_together, prepared, request
from tests.worker.solo import diffusers_pipeline, draw_solo, worst_difference

MULTIPLE = 4  # pixels
LIMIT = 544  # text tokens: the tiny checkpoint's position table has 546 places

# 64, 48 and 64 image tokens; the second is padded to 64 within its row, and each has another text length.
MIXED = [
    request("guided", seed=1, prompt=LONG, guidance_scale=3.0),
    request("unguided", seed=2, prompt="frog", height=24, guidance_scale=0.0, num_inference_steps=8),
    request("cut", seed=3, prompt=LONG, width=64, height=16, max_sequence_length=12, negative_prompt="blurry"),
]


@pytest.fixture
def z_image(tiny: Callable[[str], StepPipeline]) -> StepPipeline:
    return tiny("z-image")


@pytest.fixture
def rows_of_forwards(z_image: StepPipeline) -> Iterator[list[int]]:
    """How many rows each forward had."""
    rows: list[int] = []
    transformer = diffusers_pipeline(z_image).transformer
    hook = transformer.register_forward_pre_hook(lambda module, arguments: rows.append(len(arguments[0])))
    yield rows
    hook.remove()


async def test_sizes_texts_and_guidance_are_mixed_in_one_forward(
    z_image: StepPipeline, rows_of_forwards: list[int]
) -> None:
    outcomes = await draw_together(z_image, {0: MIXED})
    assert rows_of_forwards == [5] * 6 + [1] * 2
    assert furthest(z_image, outcomes, MIXED) <= 1


def furthest(pipeline: StepPipeline, outcomes: dict[str, Any], members: Sequence[DiffusionRequest]) -> int:
    """The worst difference of any member from its solo picture."""
    assert all(isinstance(picture, Image.Image) for picture in outcomes.values()), outcomes
    return max(worst_difference(outcomes[member.request_id], draw_solo(pipeline, member.params)) for member in members)


class SwappedTimesteps(Wrapped):
    """Gives the first two requests each other's timesteps."""

    def denoise_step(self, input_batch: StepInputBatch) -> Sequence[torch.Tensor]:
        if input_batch.requests > 1:
            input_batch.timesteps[:2] = input_batch.timesteps[:2].flip(0)
        return self.inner.denoise_step(input_batch)


async def test_rows_of_other_sizes_that_are_swapped_are_seen(z_image: StepPipeline) -> None:
    outcomes = await draw_together(SwappedTimesteps(z_image), {0: MIXED[:1], 2: MIXED[1:2]})
    assert furthest(z_image, outcomes, MIXED[:2]) >= 8


@pytest.mark.parametrize(("guidance_scale", "rows"), [(0.0, 1), (0.5, 2), (1.0, 2), (4.0, 2)])
async def test_guidance_is_on_above_zero(z_image: StepPipeline, guidance_scale: float, rows: int) -> None:
    asked = request("r", guidance_scale=guidance_scale, num_inference_steps=2)
    assert prepared(z_image, asked).rows == rows
    assert uses_cfg(asked.params, z_image.profile("m", 50)) is (rows == 2)
    assert furthest(z_image, await draw_together(z_image, {0: [asked]}), [asked]) <= 1


def test_a_negative_prompt_does_nothing_without_guidance(z_image: StepPipeline) -> None:
    assert z_image.prompts(request("r", guidance_scale=0.0, negative_prompt="blurry")).uncond is None


def test_a_text_encodes_the_same_beside_a_longer_one_and_again(z_image: StepPipeline) -> None:
    frog, longer = PromptText("frog", 512), PromptText(LONG, 512)
    with torch.inference_mode():
        together, _ = z_image.encode_prompts([frog, longer])
        (alone,) = z_image.encode_prompts([frog])
    assert together.conditioning.prompt_mask is None
    assert together.conditioning.prompt_embeds.shape == alone.conditioning.prompt_embeds.shape
    assert torch.allclose(together.conditioning.prompt_embeds, alone.conditioning.prompt_embeds, atol=1e-5)


def test_a_cut_text_is_counted_with_its_frame(z_image: StepPipeline) -> None:
    tokenizer = diffusers_pipeline(z_image).tokenizer
    framed = "<|im_start|>user\nfrog<|im_end|>\n<|im_start|>assistant\n"
    tokens = len(tokenizer(framed).input_ids)
    whole, cut = (z_image.encode_prompts([PromptText("frog", length)])[0] for length in (tokens, tokens - 2))
    assert whole.cuts == ()
    assert cut.cuts == (f"is too long for the text encoder, which takes {tokens - 2} tokens: the last 2 were dropped",)
    assert cut.conditioning.prompt_embeds.shape[1] == tokens - 2


async def test_the_longest_text_at_the_largest_size_has_a_position(z_image: StepPipeline) -> None:
    profile = z_image.profile("m", 50)
    assert (profile.max_sequence_length_limit, profile.default_max_sequence_length) == (LIMIT, 512)
    side = profile.size.max_side
    text = "apple " * 700
    longest = request("r", prompt=text, height=side, width=side, max_sequence_length=LIMIT, num_inference_steps=1)
    assert furthest(z_image, await draw_together(z_image, {0: [longest]}), [longest]) <= 1
    with pytest.raises(IndexError):
        draw_solo(z_image, request("r", prompt=text, max_sequence_length=LIMIT + 1).params)
    with pytest.raises(IndexError):
        draw_solo(z_image, request("r", width=side + MULTIPLE).params)


async def test_the_smallest_picture_is_one_image_token(z_image: StepPipeline) -> None:
    side = z_image.profile("m", 50).size.min_side
    smallest = request("r", height=side, width=side)
    assert prepared(z_image, smallest).image_tokens == 1
    assert furthest(z_image, await draw_together(z_image, {0: [smallest]}), [smallest]) <= 1


def test_a_size_that_would_be_rounded_is_refused_by_name(z_image: StepPipeline) -> None:
    with pytest.raises(RequestError) as refused:
        z_image.prompts(request("r", width=34))
    assert (refused.value.info.code, refused.value.info.param) == ("invalid_request", "width")
    assert refused.value.info.message == "width must be a multiple of 4, and is 34"


def test_a_text_length_by_default_is_what_the_positions_allow(z_image: StepPipeline) -> None:
    defaults = ServingDefaults(default_max_sequence_length=4096, default_guidance_scale=0.0)
    profile = ZImageStepPipeline(diffusers_pipeline(z_image), z_image.device, defaults).profile("m", 50)
    assert profile.default_max_sequence_length == LIMIT
    assert profile.default_guidance_scale == 0.0
