"""Qwen-Image's own: sizes and text lengths mixed in one forward, and guidance that needs a negative prompt."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from PIL import Image

from common.errors import ConfigError, RequestError
from common.params import DiffusionRequest
from common.rows import uses_cfg
from services.worker.input_batch import guide
from services.worker.pipelines import qwen_image as family
from services.worker.pipelines.protocol import ServingDefaults, StepPipeline
from services.worker.pipelines.qwen_image_attention import RowLayout, row_layout
from services.worker.preparation import Preparation
from services.worker.state import PromptText
from tests.worker.driving import LONG, draw_together, prepared
from tests.worker.driving import request as any_request
from tests.worker.solo import diffusers_pipeline, draw_solo, worst_difference


def request(request_id: str, **changes: Any) -> DiffusionRequest:
    """A request in this model's own terms, guided unless it says otherwise."""
    guided = {"guidance_scale": 1.0, "true_cfg_scale": 4.0, "negative_prompt": ""}
    return any_request(request_id, **(guided | changes))


# 64, 64, 48 and 96 image tokens. The first two need no padding, yet their places are not the same.
SQUARE = request("square", seed=1)
WIDE = request("wide", seed=2, height=16, width=64, prompt=LONG, true_cfg_scale=7.0, num_inference_steps=8)
SMALL = request("small", seed=3, height=24, prompt="frog", negative_prompt=None)
TALL = request("tall", seed=4, height=48, prompt=LONG, max_sequence_length=7, negative_prompt="blurry, ugly, watermark")


@pytest.fixture
def qwen(tiny: Callable[[str], StepPipeline]) -> StepPipeline:
    return tiny("qwen-image")


@pytest.fixture
def rows_of_forwards(qwen: StepPipeline) -> Iterator[list[int]]:
    """How many rows each forward had."""
    rows: list[int] = []
    transformer = diffusers_pipeline(qwen).transformer
    hook = transformer.register_forward_pre_hook(
        lambda module, arguments, named: rows.append(len(named["hidden_states"])), with_kwargs=True
    )
    yield rows
    hook.remove()


def furthest(pipeline: StepPipeline, outcomes: dict[str, Any], members: Sequence[DiffusionRequest]) -> int:
    """The worst difference of any member from its solo picture."""
    assert all(isinstance(picture, Image.Image) for picture in outcomes.values()), outcomes
    return max(worst_difference(outcomes[member.request_id], draw_solo(pipeline, member.params)) for member in members)


async def test_sizes_texts_and_guidance_are_mixed_in_one_forward(
    qwen: StepPipeline, rows_of_forwards: list[int]
) -> None:
    members = [SQUARE, WIDE, SMALL, TALL]
    outcomes = await draw_together(qwen, {0: members})
    assert rows_of_forwards == [7] * 6 + [2] * 2
    assert furthest(qwen, outcomes, members) <= 1


async def test_one_that_joins_later_at_another_size_is_drawn_right(qwen: StepPipeline) -> None:
    assert furthest(qwen, await draw_together(qwen, {0: [SQUARE], 2: [TALL]}), [SQUARE, TALL]) <= 1


# What each part of a row's layout is for: without it, pictures are wrong.
SPOILT: dict[str, Callable[[RowLayout, int], RowLayout]] = {
    "every key counts": lambda layout, rows: layout._replace(keys=None),
    "the first row's image places": lambda layout, rows: layout._replace(
        image_rotary=layout.image_rotary.chunk(rows)[0].repeat(rows, 1)
    ),
    "the first row's text places": lambda layout, rows: layout._replace(
        text_rotary=layout.text_rotary.chunk(rows)[0].repeat(rows, 1)
    ),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=list(SPOILT))
async def test_rows_with_a_wrong_layout_are_seen(
    qwen: StepPipeline, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[RowLayout, int], RowLayout]
) -> None:
    monkeypatch.setattr(
        family, "row_layout", lambda pos_embed, shapes, *rest: spoil(row_layout(pos_embed, shapes, *rest), len(shapes))
    )
    outcomes = await draw_together(qwen, {0: [SQUARE, TALL]})
    assert furthest(qwen, outcomes, [SQUARE, TALL]) >= 8


async def test_without_padding_the_places_are_still_each_rows_own(
    qwen: StepPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = request("wide", seed=2, height=16, width=64)
    assert furthest(qwen, await draw_together(qwen, {0: [SQUARE, wide]}), [SQUARE, wide]) <= 1
    monkeypatch.setattr(family, "row_layout", lambda *arguments: None)
    assert furthest(qwen, await draw_together(qwen, {0: [SQUARE, wide]}), [SQUARE, wide]) >= 8


async def test_the_length_of_a_guided_prediction_matters(qwen: StepPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "_guide", guide)
    assert furthest(qwen, await draw_together(qwen, {0: [SQUARE, SMALL]}), [SQUARE, SMALL]) >= 8


def test_called_alone_the_pipeline_draws_as_diffusers_left_it(
    qwen: StepPipeline, checkpoint: Callable[[str], Path]
) -> None:
    """The attention that the step pipeline puts into the transformer changes nothing of the reference."""
    untouched: Any = QwenImagePipeline.from_pretrained(checkpoint("qwen-image"))
    processors = untouched.transformer.attn_processors.values()
    assert {type(processor) for processor in processors} == {QwenDoubleStreamAttnProcessor2_0}
    untouched.set_progress_bar_config(disable=True)
    picture = untouched(
        LONG,
        height=48,
        width=32,
        num_inference_steps=6,
        true_cfg_scale=4.0,
        negative_prompt="blurry, ugly, watermark",
        max_sequence_length=7,
        generator=torch.Generator("cpu").manual_seed(4),
    ).images[0]
    assert worst_difference(draw_solo(qwen, TALL.params), picture) == 0


@pytest.mark.parametrize(
    ("scale", "negative_prompt", "guided"),
    [
        (4.0, "blurry", True),
        (4.0, "", True),
        (1.1, "", True),
        (None, "", True),  # the call's default, 4
        (4.0, None, False),
        (None, None, False),
        (1.0, "blurry", False),
        (0.0, "blurry", False),
    ],
)
def test_guidance_needs_a_scale_above_one_and_a_negative_prompt(
    qwen: StepPipeline, scale: float | None, negative_prompt: str | None, guided: bool
) -> None:
    asked = request("r", true_cfg_scale=scale, negative_prompt=negative_prompt)
    assert (qwen.prompts(asked).uncond is not None) is guided
    assert uses_cfg(asked.params, qwen.profile("m", 50)) is guided


def test_an_absent_scale_is_that_of_the_call(qwen: StepPipeline) -> None:
    state = Preparation(qwen).prepare_one(request("r", true_cfg_scale=None))
    assert (state.guidance_scale, state.rows) == (4.0, 2)


async def test_without_a_negative_prompt_the_scale_does_nothing(qwen: StepPipeline) -> None:
    asked = request("r", negative_prompt=None, true_cfg_scale=7.0)
    outcomes = await draw_together(qwen, {0: [asked]})
    assert furthest(qwen, outcomes, [asked]) <= 1
    assert furthest(qwen, outcomes, [request("r", negative_prompt="", true_cfg_scale=7.0)]) >= 16


def test_a_guidance_scale_in_vain_is_said(qwen: StepPipeline) -> None:
    preparation = Preparation(qwen)
    assert preparation.prepare_one(request("r")).warnings == ()
    (warning,) = preparation.prepare_one(request("r", guidance_scale=3.5)).warnings
    assert warning.startswith("guidance_scale has no effect")


def test_a_text_encodes_the_same_beside_a_longer_one(qwen: StepPipeline) -> None:
    with torch.inference_mode():
        together, longer = qwen.encode_prompts([PromptText("frog", 512), PromptText(LONG, 512)])
        (alone,) = qwen.encode_prompts([PromptText("frog", 512)])
    assert together.conditioning.prompt_mask is None
    assert together.conditioning.prompt_embeds.shape == alone.conditioning.prompt_embeds.shape
    assert longer.conditioning.prompt_embeds.shape[1] > alone.conditioning.prompt_embeds.shape[1]
    assert torch.allclose(together.conditioning.prompt_embeds, alone.conditioning.prompt_embeds, atol=1e-5)


def test_only_dropped_words_of_the_prompt_are_counted(qwen: StepPipeline) -> None:
    """Behind the prompt the template has five tokens more, which go first and are nobody's words."""
    tokens = len(diffusers_pipeline(qwen).tokenizer(LONG).input_ids)
    whole, cut = (qwen.encode_prompts([PromptText(LONG, length)])[0] for length in (tokens, tokens - 3))
    assert whole.cuts == ()
    assert cut.cuts == (f"is too long for the text encoder, which takes {tokens - 3} tokens: the last 3 were dropped",)
    assert cut.conditioning.prompt_embeds.shape[1] == tokens - 3


def test_a_text_longer_than_the_pipeline_takes_is_refused(qwen: StepPipeline) -> None:
    with pytest.raises(RequestError, match="cannot be greater than 1024"):
        qwen.prompts(request("r", max_sequence_length=1025))


def test_the_profile_says_what_the_call_does(qwen: StepPipeline) -> None:
    profile = qwen.profile("m", 1000)
    assert (profile.default_true_cfg_scale, profile.default_num_inference_steps) == (4.0, 50)
    assert (profile.default_max_sequence_length, profile.max_sequence_length_limit) == (512, 1024)
    assert (profile.default_height, profile.default_width) == (256, 256)
    assert (profile.size.multiple, profile.size.pixels_per_token) == (4, 4)
    assert {"true_cfg_scale", "max_sequence_length"} <= set(profile.accepts)
    assert prepared(qwen, request("r", height=16, width=24)).image_tokens == 4 * 6


@pytest.mark.parametrize(
    ("component", "field"),
    [
        ("transformer", "guidance_embeds"),
        ("transformer", "use_additional_t_cond"),
    ],
)
def test_what_diffusers_itself_cannot_run_is_refused_at_the_start(
    checkpoint: Callable[[str], Path], component: str, field: str
) -> None:
    pipe: Any = QwenImagePipeline.from_pretrained(checkpoint("qwen-image"))
    getattr(pipe, component).register_to_config(**{field: True})
    with pytest.raises(ConfigError, match=field):
        family.QwenImageStepPipeline(pipe, torch.device("cpu"), ServingDefaults())
