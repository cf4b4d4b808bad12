"""PixArt-Sigma's own: sizes that are drawn and sizes that are asked for, and texts whose padding is masked."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from common.errors import ConfigError, RequestError
from common.params import DiffusionRequest
from common.rows import uses_cfg
from services.worker.input_batch import StepInputBatch
from services.worker.loader import load_pipeline
from services.worker.pipelines.pixart_sigma import PixArtSigmaStepPipeline
from services.worker.pipelines.protocol import ServingDefaults, StepPipeline
from services.worker.state import PromptText
from tests.checkpoints.pixart_sigma import save_pixart
from tests.worker.driving import LONG, Wrapped, draw_together, prepared, request
from tests.worker.solo import diffusers_pipeline, draw_solo, worst_difference

# Texts of other lengths, each cut to another, one of them unguided. All are drawn at 256x256.
MIXED = [
    request("default", seed=1, prompt=LONG, height=256, width=256),
    request("unguided", seed=2, prompt="frog", guidance_scale=1.0, num_inference_steps=8),
    request("cut", seed=3, prompt=LONG, max_sequence_length=12, negative_prompt="blurry, ugly"),
    request("longer", seed=4, prompt=LONG, max_sequence_length=40, height=200, width=200),
]


@pytest.fixture
def pixart(tiny: Callable[[str], StepPipeline]) -> StepPipeline:
    return tiny("pixart")


@pytest.fixture
def rows_of_forwards(pixart: StepPipeline) -> Iterator[list[int]]:
    """How many rows each forward had."""
    rows: list[int] = []
    transformer = diffusers_pipeline(pixart).transformer
    hook = transformer.register_forward_pre_hook(lambda module, arguments: rows.append(len(arguments[0])))
    yield rows
    hook.remove()


def furthest(pipeline: StepPipeline, outcomes: dict[str, Any], members: Sequence[DiffusionRequest]) -> int:
    """The worst difference of any member from its solo picture."""
    assert all(isinstance(picture, Image.Image) for picture in outcomes.values()), outcomes
    return max(worst_difference(outcomes[member.request_id], draw_solo(pipeline, member.params)) for member in members)


async def test_text_lengths_guidance_and_sizes_that_are_drawn_alike_share_one_forward(
    pixart: StepPipeline, rows_of_forwards: list[int]
) -> None:
    outcomes = await draw_together(pixart, {0: MIXED})
    assert rows_of_forwards == [7] * 6 + [1] * 2
    assert furthest(pixart, outcomes, MIXED) <= 1
    cut, longer = (request("r", seed=3, prompt=LONG, max_sequence_length=length) for length in (12, 40))
    assert worst_difference(draw_solo(pixart, cut.params), draw_solo(pixart, longer.params)) >= 8


class Unmasked(Wrapped):
    """Lets the padding of texts count."""

    def denoise_step(self, input_batch: StepInputBatch) -> Sequence[torch.Tensor]:
        input_batch.prompt_mask = None
        return self.inner.denoise_step(input_batch)


async def test_padding_that_counts_is_seen(pixart: StepPipeline) -> None:
    members = [MIXED[0], request("short", prompt="frog")]
    outcomes = await draw_together(Unmasked(pixart), {0: members})
    assert furthest(pixart, outcomes, members) >= 8


@pytest.mark.parametrize(
    ("height", "width", "drawn"),
    [(256, 256, (256, 256)), (32, 32, (256, 256)), (160, 400, (160, 400)), (157, 401, (160, 400))],
)
async def test_a_size_is_drawn_as_diffusers_draws_it(
    pixart: StepPipeline, height: int, width: int, drawn: tuple[int, int]
) -> None:
    asked = request("r", height=height, width=width, num_inference_steps=2, guidance_scale=1.0)
    state = prepared(pixart, asked)
    assert tuple(side * 8 for side in state.latents.shape[2:]) == drawn
    assert state.image_tokens == drawn[0] * drawn[1] // 16**2
    picture = (await draw_together(pixart, {0: [asked]}))["r"]
    assert isinstance(picture, Image.Image)
    assert picture.size == (width, height)
    assert worst_difference(picture, draw_solo(pixart, asked.params)) <= 1


def test_a_size_that_is_drawn_as_another_is_told(pixart: StepPipeline) -> None:
    assert prepared(pixart, request("r", height=160, width=400)).warnings == ()
    assert prepared(pixart, request("r", height=150, width=400)).warnings == (
        "size 400x150 is not one that the model draws: the picture was drawn at 416x144, then scaled and cropped",
    )


def test_a_size_that_diffusers_can_not_scale_to_is_refused(pixart: StepPipeline) -> None:
    missed = request("r", height=208, width=96, num_inference_steps=1)
    assert draw_solo(pixart, missed.params).size != (96, 208)
    with pytest.raises(RequestError, match=r"96x208.* 176x368 itself can be had") as refused:
        prepared(pixart, missed)
    assert (refused.value.info.code, refused.value.info.param) == ("invalid_request", "size")
    assert prepared(pixart, request("r", height=209, width=96)).total_steps > 0


def test_the_pipelines_own_check_is_heeded(pixart: StepPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*arguments: Any, **keywords: Any) -> None:
        raise ValueError("not this one")

    monkeypatch.setattr(diffusers_pipeline(pixart), "check_inputs", refuses)
    with pytest.raises(RequestError, match="not this one"):
        pixart.prompts(request("r"))


@pytest.mark.parametrize(("guidance_scale", "rows"), [(0.0, 1), (1.0, 1), (1.01, 2)])
def test_guidance_is_on_above_one(pixart: StepPipeline, guidance_scale: float, rows: int) -> None:
    asked = request("r", guidance_scale=guidance_scale)
    assert prepared(pixart, asked).rows == rows
    assert uses_cfg(asked.params, pixart.profile("m", 50)) is (rows == 2)


def test_an_absent_negative_prompt_is_an_empty_one(pixart: StepPipeline) -> None:
    absent, empty = (pixart.prompts(request("r", negative_prompt=text)).uncond for text in (None, ""))
    assert absent == empty == PromptText("", 300)


def test_what_counts_of_a_text_is_its_tokens_whoever_is_encoded_beside_it(pixart: StepPipeline) -> None:
    frog, longer = PromptText("frog", 300), PromptText(LONG, 300)
    with torch.inference_mode():
        beside, long = (encoded.conditioning for encoded in pixart.encode_prompts([frog, longer]))
        (alone,) = (encoded.conditioning for encoded in pixart.encode_prompts([frog]))
    tokenizer = diffusers_pipeline(pixart).tokenizer
    for text, conditioning in (("frog", beside), (LONG, long)):
        tokens = len(tokenizer(text).input_ids)
        assert conditioning.prompt_mask is not None
        assert conditioning.prompt_mask.tolist() == [[True] * tokens + [False] * (300 - tokens)]
    assert torch.allclose(beside.prompt_embeds, alone.prompt_embeds, atol=1e-5)


def test_texts_are_cleaned_as_the_call_cleans_them(pixart: StepPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = diffusers_pipeline(pixart)
    asked: list[bool] = []

    def cleaned(texts: list[str], clean_caption: bool = False) -> list[str]:
        asked.append(clean_caption)
        return [text.removeprefix("<br>") for text in texts]

    monkeypatch.setattr(pipe, "_text_preprocessing", cleaned)
    tokens = len(pipe.tokenizer("frog").input_ids)
    with torch.inference_mode():
        fits, cut = (pixart.encode_prompts([PromptText("<br>frog", length)])[0] for length in (tokens, tokens - 1))
    assert asked == [True] * len(asked)
    assert asked
    assert fits.cuts == ()
    assert cut.cuts == (
        f"is too long for the T5 text encoder, which takes {tokens - 1} tokens: the last 1 were dropped",
    )


async def test_a_transformer_that_predicts_no_variance_keeps_all_its_channels(tmp_path: Path) -> None:
    pipeline = load_pipeline(str(save_pixart(tmp_path, out_channels=4)), "cpu", "float32")
    members = [request("a", num_inference_steps=3), request("b", seed=2, num_inference_steps=2, guidance_scale=1.0)]
    assert furthest(pipeline, await draw_together(pipeline, {0: members}), members) <= 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sample_size": 16}, "sample_size is 16, and sizes are known for 32, 64, 128, 256 only"),
        ({"in_channels": 9}, "takes 9 channels and its VAE 4"),
        ({"out_channels": None}, "out_channels is None"),
    ],
)
def test_a_transformer_that_diffusers_can_not_draw_with_is_refused(
    pixart: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str
) -> None:
    transformer = pixart._pipe.transformer
    config = type(transformer.config)(dict(transformer.config) | changes)
    monkeypatch.setattr(transformer, "_internal_dict", config)
    with pytest.raises(ConfigError, match=reason):
        PixArtSigmaStepPipeline(pixart._pipe, pixart.device, ServingDefaults())


def test_a_transformer_that_takes_more_conditions_is_refused(pixart: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixart._pipe.transformer, "use_additional_conditions", True)
    with pytest.raises(ConfigError, match="use_additional_conditions"):
        PixArtSigmaStepPipeline(pixart._pipe, pixart.device, ServingDefaults())


def test_the_profile_is_that_of_the_diffusers_call(pixart: Any) -> None:
    profile = pixart.profile("m", 200)
    assert (profile.default_num_inference_steps, profile.default_guidance_scale) == (20, 4.5)
    assert (profile.default_height, profile.default_width) == (256, 256)
    assert (profile.default_max_sequence_length, profile.max_sequence_length_limit) == (300, 512)
    size = profile.size
    assert (size.multiple, size.min_side, size.max_side, size.pixels_per_token) == (1, 128, 512, 16)
    assert profile.mixes == ("steps", "guidance", "cfg", "max_sequence_length")


def test_a_serving_defaults_file_limits_sides_and_texts(pixart: Any) -> None:
    defaults = ServingDefaults(max_side=200, default_max_sequence_length=600)
    profile = PixArtSigmaStepPipeline(pixart._pipe, pixart.device, defaults).profile("m", 200)
    assert (profile.size.min_side, profile.size.max_side, profile.default_height) == (128, 200, 200)
    assert (profile.default_max_sequence_length, profile.max_sequence_length_limit) == (600, 600)
