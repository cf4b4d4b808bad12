"""The schema alone: whatever JSON comes, out comes a call that a worker can take, or an error that names a field."""

import json
import math
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import codec
from common.messages import CfgRule, ModelProfile, ModelStatus, SubmitRequests
from common.params import LoraSpec
from services.gateway.errors import ApiError
from services.gateway.fields import shown
from services.gateway.models import ModelTable
from services.gateway.schema import ImageCall, image_call, read_json
from services.gateway.sizes import size_fault
from tests.builders import GATEWAY, HOME, profile

EVERYTHING = profile(
    accepts=("lora", "true_cfg_scale", "max_sequence_length", "num_frames", "scheduler", "sigmas", "timesteps"),
    default_true_cfg_scale=4.0,
    default_max_sequence_length=256,
    max_sequence_length_limit=512,
    max_num_frames=81,
    schedulers=("PNDMScheduler", "DDIMScheduler", "EulerDiscreteScheduler"),
)


def table(*profiles: ModelProfile) -> ModelTable:
    models = ModelTable(lambda: 0.0)
    models.update(tuple(ModelStatus(profile=one, workers=1) for one in profiles))
    return models


def parse(body: dict[str, Any], of: ModelProfile = EVERYTHING) -> ImageCall:
    return image_call({"prompt": "red apple"} | body, table(of), HOME, "call", lambda: 99)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
PLAUSIBLE = {
    "prompt": st.text(max_size=40),
    "model": st.sampled_from(["demo", "nope"]),
    "negative_prompt": st.text(max_size=40),
    "n": st.integers(-1, 12) | st.floats(0, 12),
    "size": st.sampled_from(["auto", "64x64", "65x64", "1x1", "999x999", "x"]) | st.from_regex(r"\d{1,4}x\d{1,4}"),
    "num_frames": st.integers(-1, 90),
    "num_inference_steps": st.integers(-1, 300),
    "scheduler": st.sampled_from(["PNDMScheduler", "DDIMScheduler", "nope"])
    | st.fixed_dictionaries({"name": st.just("DDIMScheduler")}, optional={"options": anything}),
    "sigmas": st.lists(st.floats(-1, 20), max_size=4),
    "timesteps": st.lists(st.integers(-1, 1000), max_size=4),
    "guidance_scale": st.floats() | st.integers(),
    "true_cfg_scale": st.floats(),
    "max_sequence_length": st.integers(-1, 600),
    "seed": st.integers(-1, 2**64),
    "lora": st.lists(
        st.fixed_dictionaries({"name": st.text(max_size=8)}, optional={"scale": st.floats()}), max_size=10
    ),
    "response_format": st.sampled_from(["b64_json", "url", "x"]),
    "output_format": st.sampled_from(["png", "jpeg", "webp", "mp4", "gif"]),
    "output_compression": st.integers(-1, 101),
    "stream": st.booleans(),
    "partial_images": st.integers(0, 4),
    "quality": st.sampled_from(["auto", "low", "hd", "x"]),
    "style": st.sampled_from(["vivid", "x"]),
    "background": st.sampled_from(["auto", "transparent"]),
    "moderation": st.sampled_from(["auto", "low", "x"]),
    "user": st.text(max_size=8),
}
bodies = st.fixed_dictionaries(
    {"prompt": st.just("red apple") | anything},
    optional={name: st.none() | plausible | anything for name, plausible in PLAUSIBLE.items() if name != "prompt"},
)


def assert_sound(call: ImageCall, of: ModelProfile) -> None:
    """It can be sent, and every value is one that a worker of that model takes."""
    sent = SubmitRequests(gateway_id=GATEWAY, requests=call.requests)
    assert codec.to_scheduler.decode(codec.encode(sent)) == sent
    assert 1 <= len(call.requests) <= 10
    for index, request in enumerate(call.requests):
        params = request.params
        assert request.request_id == f"call-{index}"
        assert params.seed == call.requests[0].params.seed + index
        assert 0 <= params.seed < 2**63
        assert size_fault(of.size, params.width, params.height) is None
        assert 1 <= params.num_inference_steps <= of.max_num_inference_steps
        assert 1 <= params.num_frames <= of.max_num_frames
        assert (params.num_frames > 1) == (request.output.output_format == "mp4")
        assert math.isfinite(params.guidance_scale)
        assert params.prompt.strip()


def outcome(body: dict[str, Any]) -> ImageCall | ApiError:
    try:
        return image_call(body, table(EVERYTHING), HOME, "call", lambda: 99)
    except ApiError as error:
        return error


def assert_sound_or_refused(body: dict[str, Any]) -> None:
    result = outcome(body)
    if isinstance(result, ImageCall):
        assert_sound(result, EVERYTHING)
        return
    assert result.status in (400, 404)
    field = re.split(r"[.\[]", result.param or "")[0] if result.param not in body else result.param
    assert field in {*(name[:128] for name in body), "prompt"}
    assert not result.retry
    assert json.loads(json.dumps(result.body)) == result.body


@given(bodies)
@settings(max_examples=250, deadline=None)
def test_known_fields_with_any_values_are_a_sound_call_or_an_error_that_names_the_field(body: dict[str, Any]) -> None:
    assert_sound_or_refused(body)


@given(st.dictionaries(st.sampled_from(sorted(PLAUSIBLE)) | st.text(max_size=12), anything, max_size=6))
@settings(max_examples=150, deadline=None)
def test_any_object_is_a_sound_call_or_an_error_that_names_the_field(body: dict[str, Any]) -> None:
    assert_sound_or_refused(body)


@given(st.binary(max_size=60) | anything.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_an_object_or_an_error_of_the_whole_body(data: bytes) -> None:
    try:
        body = read_json(data)
    except ApiError as error:
        refusal = error
    else:
        assert isinstance(body, dict)
        return
    assert (refusal.status, refusal.param) == (400, None)


def test_value_that_is_nested_deeply_is_described_and_not_written_out() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    assert shown(value) == "an array"


def test_seeds_count_up_from_the_one_drawn() -> None:
    assert [request.params.seed for request in parse({"n": 3}).requests] == [99, 100, 101]


@pytest.mark.parametrize("value", [20, 20.0])
def test_integral_numbers_are_integers_however_they_are_written(value: float) -> None:
    steps = parse({"num_inference_steps": value}).requests[0].params.num_inference_steps
    assert steps == 20
    assert isinstance(steps, int)


@pytest.mark.parametrize("name", sorted(PLAUSIBLE.keys() - {"prompt"}))
def test_null_means_absent(name: str) -> None:
    assert parse({name: None}) == parse({})


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": "b64_json"},
        {"background": "auto"},
        {"background": "opaque"},
        {"moderation": "low"},
        {"user": "someone"},
        {"safety_identifier": "someone"},
        {"stream": False},
        {"partial_images": 0},
        {"output_compression": 100},
        {"output_format": "jpeg", "output_compression": 0},
    ],
    ids=str,
)
def test_openais_other_fields_are_accepted_without_a_warning(body: dict[str, Any]) -> None:
    assert parse(body).warnings == ()


def test_explicit_defaults_equal_absent_fields() -> None:
    explicit = {
        "size": "64x64",
        "num_inference_steps": 20,
        "guidance_scale": 4,
        "n": 1,
        "num_frames": 1,
        "output_format": "png",
        "output_compression": 100,
    }
    assert parse(explicit) == parse({})


@pytest.mark.parametrize("quality", ["low", "medium", "high", "xhigh", "max"])
def test_quality_is_named_as_it_was_asked(quality: str) -> None:
    assert parse({"quality": quality}).quality == quality


@pytest.mark.parametrize("quality", ["auto", "standard", "hd", None])
def test_quality_without_a_name_in_the_reply_is_high(quality: str | None) -> None:
    assert parse({"quality": quality}).quality == "high"


def test_max_sequence_length_is_taken_and_defaulted_where_the_model_has_the_choice() -> None:
    assert parse({"max_sequence_length": 512}).requests[0].params.max_sequence_length == 512
    assert parse({}).requests[0].params.max_sequence_length == 256
    assert parse({}, profile()).requests[0].params.max_sequence_length is None
    with pytest.raises(ApiError, match="from 1 to 512, not 513"):
        parse({"max_sequence_length": 513})


def test_true_cfg_scale_is_taken_where_the_model_heeds_it() -> None:
    assert parse({"true_cfg_scale": 2}).requests[0].params.true_cfg_scale == 2.0
    assert parse({}).requests[0].params.true_cfg_scale == 4.0


@pytest.mark.parametrize(
    ("lora", "adapters"),
    [
        ({"name": "pixel"}, (LoraSpec("pixel", 1.0),)),
        ([{"name": "a", "scale": 0.5}, {"name": "b", "scale": -1}], (LoraSpec("a", 0.5), LoraSpec("b", -1.0))),
        ([], ()),
    ],
)
def test_lora_is_one_adapter_or_several(lora: Any, adapters: tuple[LoraSpec, ...]) -> None:
    assert parse({"lora": lora}).requests[0].params.lora == adapters


@pytest.mark.parametrize(
    ("lora", "param"),
    [
        ("pixel", "lora"),
        ({}, "lora.name"),
        ({"name": ""}, "lora.name"),
        ({"name": "a", "weight": 1}, "lora"),
        ({"name": "a", "scale": "1"}, "lora.scale"),
        ({"name": "a", "scale": 11}, "lora.scale"),
        ([{"name": "a"}] * 9, "lora"),
    ],
)
def test_lora_that_makes_no_sense_is_refused(lora: Any, param: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse({"lora": lora})
    assert (raised.value.status, raised.value.param) == (400, param)


DISTILLED = msgspec.structs.replace(EVERYTHING, cfg=CfgRule(threshold=math.inf))
QWEN = msgspec.structs.replace(EVERYTHING, cfg=CfgRule(scale_field="true_cfg_scale", needs_negative_prompt=True))


@pytest.mark.parametrize(
    ("of", "body", "warning"),
    [
        (EVERYTHING, {"negative_prompt": "a"}, None),
        (
            EVERYTHING,
            {"negative_prompt": "a", "guidance_scale": 1.0},
            "negative_prompt has no effect because guidance is off (guidance_scale <= 1)",
        ),
        (EVERYTHING, {"guidance_scale": 1.0}, None),
        (QWEN, {"negative_prompt": "a"}, None),
        (
            QWEN,
            {"negative_prompt": "a", "true_cfg_scale": 1},
            "negative_prompt has no effect because guidance is off (true_cfg_scale <= 1)",
        ),
        (DISTILLED, {"negative_prompt": "a"}, "negative_prompt has no effect because this model has no"),
        (QWEN, {"true_cfg_scale": 5}, "true_cfg_scale has no effect without a negative_prompt"),
        (QWEN, {}, None),
        (EVERYTHING, {"quality": "low"}, "quality has no effect; num_inference_steps and guidance_scale decide"),
        (EVERYTHING, {"style": "vivid"}, "style has no effect"),
        (EVERYTHING, {"quality": "auto"}, None),
    ],
)
def test_what_has_no_effect_is_warned_of(of: ModelProfile, body: dict[str, Any], warning: str | None) -> None:
    warnings = parse(body, of).warnings
    assert len(warnings) == (warning is not None)
    assert all(text.startswith(warning or "") for text in warnings)
