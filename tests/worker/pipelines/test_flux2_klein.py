"""FLUX.2 klein's own: guidance away from an empty text, and a distilled model that has none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from common.rows import uses_cfg
from services.worker.loader import load_pipeline
from services.worker.pipelines.protocol import StepPipeline
from services.worker.state import PromptText
from tests.checkpoints.flux2_klein import save_flux2_klein_distilled
from tests.worker.driving import LONG, draw_together, prepared, request
from tests.worker.pipelines.transformer_inputs import Inputs, furthest, inputs_seen, rows_counted

PAIR = [request("a", seed=1, guidance_scale=1.0), request("b", seed=2, guidance_scale=1.0, prompt=LONG)]


@pytest.fixture
def klein(tiny: Callable[[str], StepPipeline]) -> StepPipeline:
    return tiny("flux2-klein")


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> StepPipeline:
    folder = save_flux2_klein_distilled(tmp_path_factory.mktemp("flux2-klein-distilled"))
    return load_pipeline(str(folder), "cpu", "float32")


@pytest.mark.parametrize("name", ["timestep", "encoder_hidden_states"])
async def test_inputs_of_two_rows_that_are_swapped_are_seen(klein: StepPipeline, name: str) -> None:
    def swapped(inputs: Inputs) -> Inputs:
        return inputs | {name: inputs[name].flip(0)}

    with inputs_seen(klein, swapped):
        outcomes = await draw_together(klein, {0: PAIR[:1], 2: PAIR[1:]})
    assert furthest(klein, outcomes, PAIR) >= 8


@pytest.mark.parametrize(("guidance_scale", "guided"), [(4.0, True), (1.1, True), (1.0, False), (0.0, False)])
def test_guidance_is_on_above_one(
    klein: StepPipeline, distilled: StepPipeline, guidance_scale: float, guided: bool
) -> None:
    asked = request("r", guidance_scale=guidance_scale)
    for pipeline, expected in ((klein, guided), (distilled, False)):
        assert (pipeline.prompts(asked).uncond is not None) is expected
        assert uses_cfg(asked.params, pipeline.profile("m", 50)) is expected


def test_without_a_negative_prompt_it_guides_away_from_an_empty_text(klein: StepPipeline) -> None:
    absent, given = (klein.prompts(request("r", negative_prompt=text)).uncond for text in (None, "blurry"))
    assert (absent, given) == (PromptText("", 512), PromptText("blurry", 512))


async def test_a_negative_prompt_is_that_of_the_calls_negative_embedding(klein: StepPipeline) -> None:
    asked = request("r", negative_prompt="blurry, ugly", max_sequence_length=64)
    outcomes = await draw_together(klein, {0: [asked]})
    assert furthest(klein, outcomes, [asked]) <= 1
    assert furthest(klein, outcomes, [request("r", max_sequence_length=64)]) >= 16


async def test_a_distilled_model_takes_one_row_whatever_the_guidance(distilled: StepPipeline) -> None:
    members = [
        request("a", seed=1, guidance_scale=7.0, prompt=LONG),
        request("b", seed=2, guidance_scale=1.0, num_inference_steps=4, width=48),
    ]
    with rows_counted(distilled) as rows:
        outcomes = await draw_together(distilled, {0: members})
    assert rows == [2] * 4 + [1] * 2
    assert furthest(distilled, outcomes, members) <= 1


def test_guidance_that_has_no_effect_is_said(klein: StepPipeline, distilled: StepPipeline) -> None:
    asked, usual = request("r", guidance_scale=7.0), request("r", guidance_scale=4.0)
    (warning,) = prepared(distilled, asked).warnings
    assert warning.startswith("guidance_scale has no effect")
    assert prepared(distilled, usual).warnings == prepared(klein, asked).warnings == ()


def test_the_schedule_depends_on_the_size_and_on_the_number_of_steps(klein: StepPipeline) -> None:
    small, large, longer = (
        prepared(klein, request("r", height=side, width=side, num_inference_steps=steps)).timesteps
        for side, steps in ((32, 4), (64, 4), (32, 8))
    )
    assert not torch.equal(small, large)
    assert not torch.equal(small, longer[::2])


def test_what_is_cut_is_counted_with_the_frame_around_the_text(klein: StepPipeline) -> None:
    tokenizer: Any = klein._pipe.tokenizer  # type: ignore[attr-defined]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": LONG}], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    tokens = len(tokenizer(text).input_ids)
    whole, cut = (klein.encode_prompts([PromptText(LONG, length)])[0] for length in (tokens, tokens - 3))
    assert whole.cuts == ()
    assert cut.cuts == (f"is too long for the text encoder, which takes {tokens - 3} tokens: the last 3 were dropped",)


def test_the_profile_says_what_the_call_does(klein: StepPipeline) -> None:
    profile = klein.profile("m", 1000)
    assert (profile.default_guidance_scale, profile.default_num_inference_steps) == (4.0, 50)
    assert (profile.default_max_sequence_length, profile.max_sequence_length_limit) == (512, 512)
    assert (profile.size.multiple, profile.size.pixels_per_token) == (4, 4)
    assert (profile.default_height, profile.default_width) == (256, 256)
    assert profile.default_true_cfg_scale is None
    assert prepared(klein, request("r", height=16, width=24)).image_tokens == 4 * 6
