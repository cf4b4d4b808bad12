"""FLUX.1's own: guidance as an input of the transformer, and another one that needs a negative prompt."""

from collections.abc import Callable, Sequence

import pytest
import torch

from common.errors import RequestError
from common.rows import uses_cfg
from services.worker.loader import load_pipeline
from services.worker.pipelines.protocol import StepPipeline
from services.worker.state import PromptText
from tests.checkpoints.flux import save_flux_schnell
from tests.worker.driving import LONG, draw_together, prepared, request
from tests.worker.pipelines.transformer_inputs import Inputs, furthest, inputs_seen, rows_counted

PLAIN = {"true_cfg_scale": 1.0}  # as the call has it by default: what `in_its_terms` then leaves alone
PAIR = [
    request("a", seed=1, guidance_scale=7.0, **PLAIN),
    request("b", seed=2, guidance_scale=1.5, prompt=LONG, **PLAIN),
]


@pytest.fixture
def flux(tiny: Callable[[str], StepPipeline]) -> StepPipeline:
    return tiny("flux")


@pytest.fixture(scope="module")
def schnell(tmp_path_factory: pytest.TempPathFactory) -> StepPipeline:
    return load_pipeline(str(save_flux_schnell(tmp_path_factory.mktemp("flux-schnell"))), "cpu", "float32")


async def test_each_row_has_its_own_embedded_guidance(flux: StepPipeline) -> None:
    with rows_counted(flux) as rows:
        outcomes = await draw_together(flux, {0: PAIR[:1], 2: PAIR[1:]})
    assert rows == [1, 1, 2, 2, 2, 2, 1, 1]
    assert furthest(flux, outcomes, PAIR) <= 1


@pytest.mark.parametrize("name", ["guidance", "timestep", "encoder_hidden_states", "pooled_projections"])
async def test_inputs_of_two_rows_that_are_swapped_are_seen(flux: StepPipeline, name: str) -> None:
    def swapped(inputs: Inputs) -> Inputs:
        return inputs | {name: inputs[name].flip(0)}

    with inputs_seen(flux, swapped):
        outcomes = await draw_together(flux, {0: PAIR[:1], 2: PAIR[1:]})
    assert furthest(flux, outcomes, PAIR) >= 8


async def test_both_kinds_of_guidance_are_each_requests_own(flux: StepPipeline) -> None:
    members = [
        request("both", seed=1, guidance_scale=2.0, true_cfg_scale=4.0, negative_prompt="blurry, ugly"),
        request("embedded", seed=2, guidance_scale=6.0, **PLAIN),
        request("empty", seed=3, guidance_scale=4.0, true_cfg_scale=2.0, negative_prompt="", prompt=LONG),
    ]
    with rows_counted(flux) as rows:
        outcomes = await draw_together(flux, {0: members})
    assert rows == [5] * 6
    assert furthest(flux, outcomes, members) <= 1


@pytest.mark.parametrize(
    ("scale", "negative_prompt", "guided"),
    [
        (4.0, "blurry", True),
        (1.1, "", True),
        (1.0, "blurry", False),
        (0.0, "blurry", False),
        (4.0, None, False),
        (None, "blurry", False),  # the call's default, 1
        (None, None, False),
    ],
)
def test_classifier_free_guidance_needs_a_scale_above_one_and_a_negative_prompt(
    flux: StepPipeline, scale: float | None, negative_prompt: str | None, guided: bool
) -> None:
    asked = request("r", true_cfg_scale=scale, negative_prompt=negative_prompt)
    assert (flux.prompts(asked).uncond is not None) is guided
    assert uses_cfg(asked.params, flux.profile("m", 50)) is guided


async def test_schnell_has_no_guidance_but_the_other_kind(schnell: StepPipeline) -> None:
    members = [
        request("plain", seed=1, guidance_scale=7.0, prompt=LONG, **PLAIN),
        request("guided", seed=2, true_cfg_scale=3.0, negative_prompt="blurry, ugly", num_inference_steps=4, width=48),
    ]
    with rows_counted(schnell) as rows:
        outcomes = await draw_together(schnell, {0: members})
    assert rows == [3] * 4 + [1] * 2
    assert furthest(schnell, outcomes, members) <= 1
    assert furthest(schnell, outcomes, [request("plain", seed=1, guidance_scale=0.0, prompt=LONG, **PLAIN)]) <= 1


def test_guidance_that_has_no_effect_is_said(flux: StepPipeline, schnell: StepPipeline) -> None:
    asked, usual = (request("r", guidance_scale=scale, **PLAIN) for scale in (7.0, 3.5))
    (warning,) = prepared(schnell, asked).warnings
    assert warning.startswith("guidance_scale has no effect")
    assert prepared(schnell, usual).warnings == prepared(flux, asked).warnings == ()


def test_the_schedule_of_dev_depends_on_the_size(flux: StepPipeline, schnell: StepPipeline) -> None:
    def schedules(pipeline: StepPipeline) -> Sequence[torch.Tensor]:
        return [prepared(pipeline, request("r", height=side, width=side, **PLAIN)).timesteps for side in (32, 64)]

    assert not torch.equal(*schedules(flux))
    assert torch.equal(*schedules(schnell))


def test_each_encoder_says_what_it_cuts(flux: StepPipeline) -> None:
    (encoded,) = flux.encode_prompts([PromptText(LONG, 16)])
    assert [cut.split(",")[0] for cut in encoded.cuts] == [
        "is too long for the CLIP text encoder",
        "is too long for the T5 text encoder",
    ]
    assert encoded.conditioning.prompt_embeds.shape[1] == 16


def test_a_text_longer_than_the_pipeline_takes_is_refused(flux: StepPipeline) -> None:
    with pytest.raises(RequestError, match="cannot be greater than 512"):
        flux.prompts(request("r", max_sequence_length=513))


def test_the_profile_says_what_the_call_does(flux: StepPipeline) -> None:
    profile = flux.profile("m", 1000)
    assert (profile.default_guidance_scale, profile.default_true_cfg_scale) == (3.5, 1.0)
    assert (profile.default_num_inference_steps, profile.default_max_sequence_length) == (28, 512)
    assert (profile.size.multiple, profile.size.pixels_per_token) == (4, 4)
    assert (profile.default_height, profile.default_width) == (256, 256)
    assert prepared(flux, request("r", height=16, width=24)).image_tokens == 4 * 6
