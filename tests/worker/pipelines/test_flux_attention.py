"""Pictures of FLUX.1 and FLUX.2 of other sizes in one forward: each row has its own places and its own padding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from services.worker.loader import load_pipeline
from services.worker.pipelines.flux_attention import RowRotary
from services.worker.pipelines.protocol import StepPipeline
from tests.worker.driving import LONG, draw_together, request
from tests.worker.pipelines.transformer_inputs import Inputs, furthest, inputs_seen, rows_counted
from tests.worker.solo import draw_solo, worst_difference

NAMES = ["flux", "flux2-klein"]

# 64, 64, 48 and 96 image tokens. The first two need no padding, yet their places are not the same.
SQUARE = request("square", seed=1)
WIDE = request("wide", seed=2, height=16, width=64, prompt=LONG, guidance_scale=7.0, num_inference_steps=8)
SMALL = request("small", seed=3, height=24, prompt="frog", guidance_scale=1.0)
TALL = request("tall", seed=4, height=48, prompt=LONG, negative_prompt="blurry, ugly, watermark")


@pytest.fixture(params=NAMES)
def flux(request: pytest.FixtureRequest, tiny: Callable[[str], StepPipeline]) -> StepPipeline:
    return tiny(request.param)


async def test_sizes_and_guidance_are_mixed_in_one_forward(flux: StepPipeline) -> None:
    members = [SQUARE, WIDE, SMALL, TALL]
    with rows_counted(flux) as rows:
        outcomes = await draw_together(flux, {0: members})
    assert rows == [7] * 6 + [2] * 2
    assert furthest(flux, outcomes, members) <= 1


async def test_one_that_joins_later_at_another_size_is_drawn_right(flux: StepPipeline) -> None:
    with rows_counted(flux) as rows:
        outcomes = await draw_together(flux, {0: [SQUARE], 2: [TALL]})
    assert rows == [2] * 2 + [4] * 4 + [2] * 2
    assert furthest(flux, outcomes, [SQUARE, TALL]) <= 1


def without_mask(attention: dict[str, Any]) -> None:
    del attention["attention_mask"]


def with_places_of_the_first_row(attention: dict[str, Any]) -> None:
    attention["row_rotary"] = RowRotary(*(table[:1].expand_as(table) for table in attention["row_rotary"]))


@pytest.mark.parametrize("spoil", [without_mask, with_places_of_the_first_row])
async def test_rows_with_wrong_attention_are_seen(flux: StepPipeline, spoil: Callable[[dict[str, Any]], None]) -> None:
    def spoilt(inputs: Inputs) -> Inputs:
        attention = dict(inputs["joint_attention_kwargs"])
        if len(inputs["hidden_states"]) > 2:  # both requests
            spoil(attention)
        return inputs | {"joint_attention_kwargs": attention}

    # Beside a short text, padding that is not masked has more of a share.
    members = [request(f"{width}", seed=width, width=width, max_sequence_length=32) for width in (32, 48)]
    with inputs_seen(flux, spoilt):
        outcomes = await draw_together(flux, {0: members})
    assert furthest(flux, outcomes, members) >= 8


async def test_without_padding_the_places_are_still_each_rows_own(flux: StepPipeline) -> None:
    wide = request("wide", seed=2, height=16, width=64)
    assert furthest(flux, await draw_together(flux, {0: [SQUARE, wide]}), [SQUARE, wide]) <= 1

    with inputs_seen(flux, lambda inputs: inputs | {"joint_attention_kwargs": {}}):
        outcomes = await draw_together(flux, {0: [SQUARE, wide]})
    assert furthest(flux, outcomes, [SQUARE, wide]) >= 8


async def test_rows_of_one_size_use_the_attention_of_diffusers(flux: StepPipeline) -> None:
    attention: list[dict[str, Any]] = []
    with inputs_seen(flux, lambda inputs: attention.append(inputs["joint_attention_kwargs"])):
        await draw_together(flux, {0: [TALL], 1: [request("other", height=48)]})
    assert attention == [{}] * 7


@pytest.mark.parametrize("name", NAMES)
def test_called_alone_the_pipeline_draws_as_diffusers_left_it(
    tiny: Callable[[str], StepPipeline], checkpoint: Callable[[str], Path], name: str
) -> None:
    """The attention that the step pipeline puts into the transformer changes nothing of the reference."""
    untouched: Any = DiffusionPipeline.from_pretrained(checkpoint(name))
    untouched.set_progress_bar_config(disable=True)
    picture = untouched(
        prompt=LONG,
        height=48,
        width=32,
        num_inference_steps=6,
        guidance_scale=1.0,
        generator=torch.Generator("cpu").manual_seed(4),
    ).images[0]
    asked = request("r", seed=4, height=48, prompt=LONG, guidance_scale=1.0)
    assert worst_difference(draw_solo(tiny(name), asked.params), picture) == 0


def test_text_of_another_limit_keeps_its_padding(flux: StepPipeline) -> None:
    """It is part of the picture, so texts of two limits are not padded to the longer."""
    short = request("short", seed=2, max_sequence_length=48).params
    assert worst_difference(draw_solo(flux, short), draw_solo(flux, request("r", seed=2).params)) > 1
    assert not flux.heeds_prompt_mask
    assert "max_sequence_length" not in flux.mixes


async def test_texts_of_two_limits_are_drawn_apart(flux: StepPipeline) -> None:
    members = [request("short", seed=2, max_sequence_length=48), request("default", seed=3)]
    with rows_counted(flux) as rows:
        outcomes = await draw_together(flux, {0: members})
    assert rows == [2, 2] * 6
    assert furthest(flux, outcomes, members) <= 1


@pytest.mark.parametrize("name", NAMES)
async def test_half_precision_is_that_of_the_call(checkpoint: Callable[[str], Path], name: str) -> None:
    """The same casts at the same places: alone in its batch, a picture has the very pixels."""
    half = load_pipeline(str(checkpoint(name)), "cpu", "bfloat16")
    asked = request("r", seed=5, guidance_scale=1.0, num_inference_steps=4)
    assert furthest(half, await draw_together(half, {0: [asked]}), [asked]) == 0
