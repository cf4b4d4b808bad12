"""What two requests must share to be in one group."""

from typing import Any

import pytest
from msgspec.structs import replace

from common.messages import CfgRule
from common.params import LoraSpec, SchedulerSpec
from services.scheduler.key import RequestShape, request_shape
from tests import builders

TRUE_CFG = CfgRule(scale_field="true_cfg_scale", threshold=1.0, needs_negative_prompt=True)


def shape(params: dict[str, Any] | None = None, **profile: Any) -> RequestShape:
    return request_shape(builders.params(**(params or {})), builders.profile(**profile))


def same(a: dict[str, Any], b: dict[str, Any], **profile: Any) -> bool:
    return shape(a, **profile).key == shape(b, **profile).key


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "blue cup"},
        {"seed": 7},
        {"num_inference_steps": 50},
        {"negative_prompt": "blurry"},
        {"scheduler": SchedulerSpec("DDIMScheduler")},
        {"sigmas": (1.0, 0.5)},
        {"guidance_scale": 4},
        {"true_cfg_scale": 2.0},
    ],
)
def test_not_in_the_key(change: dict[str, Any]) -> None:
    assert same({}, change)


@pytest.mark.parametrize(
    "change",
    [
        {"height": 128},
        {"width": 128},
        {"num_frames": 2},
        {"guidance_scale": 5.0},
        {"guidance_scale": 1.0},
        {"max_sequence_length": 256},
        {"lora": (LoraSpec("ink"),)},
    ],
)
def test_in_the_key(change: dict[str, Any]) -> None:
    assert not same({}, change)


def test_height_and_width_are_not_interchangeable() -> None:
    assert not same({"height": 64, "width": 128}, {"height": 128, "width": 64})


def test_a_lora_counts_by_name_and_scale() -> None:
    ink = {"lora": (LoraSpec("ink", 1.0),)}
    assert same(ink, {"lora": (LoraSpec("ink", 1),)})
    assert not same(ink, {"lora": (LoraSpec("ink", 0.5),)})
    assert not same(ink, {"lora": (LoraSpec("wash", 1.0),)})


@pytest.mark.parametrize(
    ("mixes", "change"),
    [
        ("guidance", {"guidance_scale": 5.0}),
        ("resolution", {"height": 128, "width": 32}),
        ("lora", {"lora": (LoraSpec("ink"),)}),
    ],
)
def test_what_a_model_mixes_is_not_in_the_key(mixes: str, change: dict[str, Any]) -> None:
    assert same({}, change, mixes=("steps", mixes))
    assert not same({}, change)


def test_mixed_guidance_does_not_mix_guidance_on_and_off() -> None:
    off = {"guidance_scale": 1.0}
    assert not same({}, off, mixes=("steps", "guidance"))
    assert not same({}, off, mixes=("steps", "cfg"))
    assert same({}, off, mixes=("steps", "guidance", "cfg"))


def test_mixed_resolution_does_not_mix_numbers_of_frames() -> None:
    assert not same({}, {"num_frames": 2}, mixes=("steps", "resolution"))


def test_true_cfg_scale_is_in_the_key_where_the_model_heeds_it() -> None:
    assert not same({"true_cfg_scale": 2.0}, {"true_cfg_scale": 3.0}, accepts=("true_cfg_scale",))
    given = {"negative_prompt": "blurry"}
    assert not same(given | {"true_cfg_scale": 2.0}, given | {"true_cfg_scale": 3.0}, cfg=TRUE_CFG)


def test_a_default_true_cfg_scale_equals_the_same_value_given() -> None:
    profile = {"cfg": TRUE_CFG, "default_true_cfg_scale": 4.0}
    given = {"negative_prompt": "blurry"}
    assert same(given, given | {"true_cfg_scale": 4.0}, **profile)
    assert shape(given, **profile).rows == 2


def test_true_cfg_scale_means_nothing_while_its_guidance_is_off() -> None:
    assert same({"true_cfg_scale": 2.0}, {"true_cfg_scale": 3.0}, cfg=TRUE_CFG)


def test_guidance_scale_counts_even_while_guidance_is_off() -> None:
    assert not same({"guidance_scale": 0.0}, {"guidance_scale": 1.0})


@pytest.mark.parametrize(
    ("params", "cfg", "rows"),
    [
        ({}, CfgRule(), 2),
        ({"guidance_scale": 1.0}, CfgRule(), 1),
        ({"guidance_scale": 1.0}, CfgRule(threshold=0.0), 2),
        ({}, CfgRule(needs_negative_prompt=True), 1),
        ({"negative_prompt": ""}, CfgRule(needs_negative_prompt=True), 2),
        ({"true_cfg_scale": 4.0}, TRUE_CFG, 1),
        ({"true_cfg_scale": 4.0, "negative_prompt": "blurry"}, TRUE_CFG, 2),
        ({"negative_prompt": "blurry"}, TRUE_CFG, 1),
    ],
)
def test_rows(params: dict[str, Any], cfg: CfgRule, rows: int) -> None:
    assert shape(params, cfg=cfg).rows == rows


def test_tokens_count_every_row_and_frame_and_round_up() -> None:
    assert shape({"height": 64, "width": 64}).row_tokens == 64
    assert shape({"height": 64, "width": 64}).tokens == 128
    assert shape({"height": 60, "width": 68}).row_tokens == 8 * 9
    assert shape({"height": 64, "width": 64, "num_frames": 3}).row_tokens == 192


@pytest.mark.parametrize(("num_frames", "row_tokens"), [(1, 64), (5, 128), (6, 192), (81, 64 * 21)])
def test_a_token_may_cover_several_frames_but_for_the_first(num_frames: int, row_tokens: int) -> None:
    rule = replace(builders.profile().size, frames_per_token=4)
    asked = {"height": 64, "width": 64, "num_frames": num_frames}
    assert shape(asked, size=rule).row_tokens == row_tokens


@pytest.mark.parametrize("change", [{"num_inference_steps": 50}, {"negative_prompt": "blurry"}])
def test_in_the_key_of_a_pipeline_that_is_called_whole(change: dict[str, Any]) -> None:
    assert not same({}, change, mixes=())
    assert same({}, change, mixes=("steps",))


def test_the_words_of_a_negative_prompt_are_never_in_the_key() -> None:
    assert same({"negative_prompt": "blurry"}, {"negative_prompt": "dark"}, mixes=())
