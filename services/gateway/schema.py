"""From the body of POST /v1/images/generations to requests, or to a 400 that says what to change.

Role: the fields of the API by name, their bounds and defaults, judged against the model's profile. Every default is
resolved here. Nothing is changed silently: what can't be done as asked is refused, what has no effect is warned of.
It draws no random number and reads no clock.
"""

import difflib
import json
import math
from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from common.messages import ModelProfile
from common.params import DataHome, DiffusionRequest, LoraSpec, SamplingParams
from common.rows import cfg_scale, uses_cfg
from services.gateway.errors import invalid
from services.gateway.fields import Body, boolean, choice, integer, number, shown, text
from services.gateway.models import ModelTable, default_size
from services.gateway.output_fields import num_frames, output_params
from services.gateway.sizes import nearest_size, parse_size, size_fault
from services.gateway.solver_fields import schedule

T = TypeVar("T")

MAX_PROMPT_CHARS = 32_000
MAX_N = 10
MAX_SEED = 2**63 - 1
MAX_GUIDANCE_SCALE = 100.0
MAX_LORAS = 8
MAX_LORA_SCALE = 10.0
_MAX_NAME_CHARS = 512

_FIELDS = (
    "prompt",
    "model",
    "negative_prompt",
    "n",
    "size",
    "num_frames",
    "num_inference_steps",
    "scheduler",
    "sigmas",
    "timesteps",
    "guidance_scale",
    "true_cfg_scale",
    "max_sequence_length",
    "seed",
    "lora",
    "response_format",
    "output_format",
    "output_compression",
    "stream",
    "partial_images",
    "quality",
    "style",
    "background",
    "moderation",
    "user",
    "safety_identifier",
)
# What people write who know another server, and what it is here.
_OTHER_NAMES = {
    "width": "size",
    "height": "size",
    "steps": "num_inference_steps",
    "num_images": "n",
    "num_outputs": "n",
    "frames": "num_frames",
    "video_length": "num_frames",
    "cfg_scale": "guidance_scale",
    "cfg": "guidance_scale",
    "num_images_per_prompt": "n",
    "sampler": "scheduler",
    "sampler_name": "scheduler",
    "solver": "scheduler",
}
_QUALITIES = ("auto", "low", "medium", "high", "xhigh", "max", "standard", "hd")
_NAMED_QUALITIES = ("low", "medium", "high", "xhigh", "max")  # those that OpenAI's reply can have


class ImageCall(Struct, frozen=True, kw_only=True):
    """A validated call: one request for each picture, and what only the reply needs."""

    requests: tuple[DiffusionRequest, ...]
    profile: ModelProfile
    quality: str  # as the reply names it; it has no effect
    warnings: tuple[str, ...]


def read_json(data: bytes) -> Body:
    """The JSON object in a body."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise invalid(None, "the body is nested too deeply") from None
    except ValueError as error:  # malformed JSON, text that is no UTF-8, an integer of thousands of digits
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "unreadable text or number"
        raise invalid(None, f"the body is not valid JSON: {reason}") from None
    if not isinstance(value, dict):
        raise invalid(None, "the body must be a JSON object")
    return value


def image_call(body: Body, models: ModelTable, home: DataHome, call_id: str, draw_seed: Callable[[], int]) -> ImageCall:
    """The requests that `body` asks for. `draw_seed` gives a seed where the client gives none."""
    _refuse_unknown(body)
    prompt = text(body, "prompt", MAX_PROMPT_CHARS)
    if prompt is None or not prompt.strip():
        raise invalid("prompt", "prompt is required: say what the picture shows")
    profile = models.find(text(body, "model", _MAX_NAME_CHARS)).profile
    width, height = _size(body, profile)
    n = _default(integer(body, "n", 1, MAX_N), 1)
    seed = _seed(body, n, draw_seed)
    steps = schedule(body, profile)
    params = SamplingParams(
        prompt=prompt,
        negative_prompt=text(body, "negative_prompt", MAX_PROMPT_CHARS),
        height=height,
        width=width,
        num_inference_steps=steps.num_inference_steps,
        scheduler=steps.scheduler,
        sigmas=steps.sigmas,
        timesteps=steps.timesteps,
        guidance_scale=_default(
            number(body, "guidance_scale", 0.0, MAX_GUIDANCE_SCALE), profile.default_guidance_scale
        ),
        true_cfg_scale=_true_cfg_scale(body, profile),
        max_sequence_length=_max_sequence_length(body, profile),
        seed=seed,
        lora=_lora(body, profile),
        num_frames=num_frames(body, profile),
    )
    output = output_params(body, profile, params.num_frames)
    _refuse_unoffered(body)
    quality = choice(body, "quality", _QUALITIES)
    return ImageCall(
        requests=tuple(
            DiffusionRequest(
                request_id=f"{call_id}-{index}",
                model=profile.model,
                params=replace(params, seed=seed + index),
                home=home,
                output=output,
            )
            for index in range(n)
        ),
        profile=profile,
        quality=quality if quality in _NAMED_QUALITIES else "high",
        warnings=tuple(_warnings(body, params, profile)),
    )


def _default(value: T | None, default: T) -> T:
    return default if value is None else value


def _refuse_unknown(body: Body) -> None:
    for name in body:
        if name in _FIELDS:
            continue
        near = _OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name[:64], _FIELDS, n=1)), None)
        proposal = f"did you mean {near!r}?" if near else f"known are: {', '.join(_FIELDS)}"
        raise invalid(name[:128], f"unknown field {shown(name)}; {proposal}", code="unknown_parameter")


def _refuse_unoffered(body: Body) -> None:
    """OpenAI's fields that are accepted only in part, and those that have no effect but must make sense."""
    if choice(body, "response_format", ("b64_json", "url")) == "url":
        raise invalid("response_format", "this server keeps no pictures to link to; use response_format 'b64_json'")
    if boolean(body, "stream"):
        raise invalid("stream", "streaming is not offered yet; leave stream out")
    if integer(body, "partial_images", 0, 3):
        raise invalid("partial_images", "partial images come with streaming, which is not offered yet; use 0")
    if choice(body, "background", ("auto", "opaque", "transparent")) == "transparent":
        raise invalid("background", "the models here draw opaque pictures only; use background 'opaque' or 'auto'")
    choice(body, "style", ("vivid", "natural"))
    choice(body, "moderation", ("auto", "low"))
    text(body, "user", _MAX_NAME_CHARS)
    text(body, "safety_identifier", _MAX_NAME_CHARS)


def _size(body: Body, profile: ModelProfile) -> tuple[int, int]:
    """Width and height in pixels."""
    value = body.get("size")
    if value is None or value == "auto":
        return profile.default_width, profile.default_height
    asked = parse_size(value) if isinstance(value, str) else None
    if asked is None:
        proposal = default_size(profile)
        raise invalid("size", f"size must be 'auto' or 'WIDTHxHEIGHT' such as '{proposal}', not {shown(value)}")
    fault = size_fault(profile.size, *asked)
    if fault is not None:
        width, height = nearest_size(profile.size, *asked)
        raise invalid(
            "size", f"{profile.model} can't draw {shown(value)}: {fault}; the nearest legal size is '{width}x{height}'"
        )
    return asked


def _seed(body: Body, n: int, draw_seed: Callable[[], int]) -> int:
    """Of the first picture; the others count up from it."""
    seed = integer(body, "seed", 0, MAX_SEED)
    if seed is None:
        return draw_seed()
    if seed + n - 1 > MAX_SEED:
        raise invalid("seed", f"the seeds of n={n} pictures count up from seed, which may be {MAX_SEED - n + 1} here")
    return seed


def _true_cfg_scale(body: Body, profile: ModelProfile) -> float | None:
    scale = number(body, "true_cfg_scale", 0.0, MAX_GUIDANCE_SCALE)
    if scale is not None and "true_cfg_scale" not in profile.accepts:
        raise invalid("true_cfg_scale", f"{profile.model} has no true_cfg_scale; its guidance is guidance_scale")
    return profile.default_true_cfg_scale if scale is None else scale


def _max_sequence_length(body: Body, profile: ModelProfile) -> int | None:
    if "max_sequence_length" in profile.accepts:
        asked = integer(body, "max_sequence_length", 1, profile.max_sequence_length_limit)
        return _default(asked, profile.default_max_sequence_length)
    if body.get("max_sequence_length") is not None:
        raise invalid("max_sequence_length", f"{profile.model} has no choice of max_sequence_length; leave it out")
    return None


def _lora(body: Body, profile: ModelProfile) -> tuple[LoraSpec, ...]:
    """One adapter as an object {name, scale}, or several as an array of them."""
    value = body.get("lora")
    if value is None:
        return ()
    if "lora" not in profile.accepts:
        raise invalid("lora", f"{profile.model} takes no LoRA adapters")
    entries = value if isinstance(value, list) else [value]
    if len(entries) > MAX_LORAS:
        raise invalid("lora", f"lora names {len(entries)} adapters; {MAX_LORAS} is the most")
    adapters = []
    for entry in entries:
        if not isinstance(entry, dict) or not entry.keys() <= {"name", "scale"}:
            raise invalid("lora", "lora must be an object with name and scale, or an array of such objects")
        fields = {f"lora.{key}": part for key, part in entry.items()}
        name = text(fields, "lora.name", _MAX_NAME_CHARS)
        if not name:
            raise invalid("lora.name", "lora.name is required")
        scale = number(fields, "lora.scale", -MAX_LORA_SCALE, MAX_LORA_SCALE)
        adapters.append(LoraSpec(name=name, scale=_default(scale, 1.0)))
    return tuple(adapters)


def _warnings(body: Body, params: SamplingParams, profile: ModelProfile) -> list[str]:
    """What the client asked for that has no effect."""
    warnings = []
    rule = profile.cfg
    if not uses_cfg(params, profile):
        if params.negative_prompt is not None:
            off = f"because guidance is off ({rule.scale_field} <= {rule.threshold:g})"
            never = "because this model has no classifier-free guidance"
            warnings.append(f"negative_prompt has no effect {never if math.isinf(rule.threshold) else off}")
        elif rule.needs_negative_prompt and body.get(rule.scale_field) is not None:
            scale = cfg_scale(params, profile)
            if scale is not None and scale > rule.threshold and scale != profile.default_true_cfg_scale:
                warnings.append(f"{rule.scale_field} has no effect without a negative_prompt")
    for name in ("quality", "style"):
        if body.get(name) not in (None, "auto"):
            warnings.append(
                f"{name} has no effect; num_inference_steps and guidance_scale decide how a picture is drawn"
            )
    return warnings
