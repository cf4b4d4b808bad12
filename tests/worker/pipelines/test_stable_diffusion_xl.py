"""Stable Diffusion XL's own: negative prompts that are absent or empty, sizes as conditions, and how it decodes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from common.errors import ConfigError, RequestError
from common.params import DiffusionRequest
from common.rows import uses_cfg
from services.worker.input_batch import StepInputBatch
from services.worker.loader import load_pipeline
from services.worker.pipelines.protocol import ServingDefaults, StepPipeline
from services.worker.pipelines.stable_diffusion_xl import StableDiffusionXLStepPipeline
from services.worker.state import PromptText
from tests.worker.driving import LONG, Wrapped, draw_together, prepared, request
from tests.worker.solo import diffusers_pipeline, draw_solo, worst_difference

PAIR = {0: [request("a", seed=1, guidance_scale=7.0)], 2: [request("b", seed=2, prompt=LONG, guidance_scale=2.0)]}
BOTH = [member for members in PAIR.values() for member in members]


@pytest.fixture
def sdxl(tiny: Callable[[str], StepPipeline]) -> StepPipeline:
    return tiny("sdxl")


def furthest(pipeline: StepPipeline, outcomes: dict[str, Any], members: Sequence[DiffusionRequest]) -> int:
    """The worst difference of any member from its solo picture."""
    assert all(isinstance(picture, Image.Image) for picture in outcomes.values()), outcomes
    return max(worst_difference(outcomes[member.request_id], draw_solo(pipeline, member.params)) for member in members)


def with_config(monkeypatch: pytest.MonkeyPatch, component: Any, **changes: Any) -> None:
    """The component as if its checkpoint had said so."""
    monkeypatch.setattr(component, "_internal_dict", type(component.config)(dict(component.config) | changes))


async def test_an_absent_negative_prompt_is_not_an_empty_one(sdxl: StepPipeline) -> None:
    absent, empty = request("absent", negative_prompt=None), request("empty", negative_prompt="")
    assert sdxl.prompts(absent).uncond == PromptText(None)
    assert sdxl.prompts(empty).uncond == PromptText("")
    outcomes = await draw_together(sdxl, {0: [absent, empty]})
    assert furthest(sdxl, outcomes, [absent, empty]) <= 1
    assert worst_difference(*(outcomes[name] for name in ("absent", "empty"))) >= 16  # type: ignore[arg-type]


async def test_it_is_one_where_the_checkpoint_says_so(sdxl: StepPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    with_config(monkeypatch, diffusers_pipeline(sdxl), force_zeros_for_empty_prompt=False)
    absent, empty = request("absent", negative_prompt=None), request("empty", negative_prompt="")
    assert sdxl.prompts(absent).uncond == sdxl.prompts(empty).uncond == PromptText("")
    assert furthest(sdxl, await draw_together(sdxl, {0: [absent]}), [absent]) <= 1


def test_the_embeddings_of_no_negative_prompt_are_zeros_whoever_is_encoded_beside_it(sdxl: StepPipeline) -> None:
    none, frog = PromptText(None), PromptText("frog")
    with torch.inference_mode():
        absent, beside = (encoded.conditioning for encoded in sdxl.encode_prompts([none, frog]))
        absent_alone, alone = (sdxl.encode_prompts([prompt])[0].conditioning for prompt in (none, frog))
    for one, other in ((absent, absent_alone), (beside, alone)):
        assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(one.tensors(), other.tensors(), strict=True))
    assert not any(tensor.any() for tensor in absent.tensors())
    assert [tensor.shape for tensor in absent.tensors()] == [tensor.shape for tensor in beside.tensors()]


@pytest.mark.parametrize(("guidance_scale", "rows"), [(0.0, 1), (1.0, 1), (1.01, 2)])
def test_guidance_is_on_above_one(sdxl: StepPipeline, guidance_scale: float, rows: int) -> None:
    asked = request("r", guidance_scale=guidance_scale, negative_prompt="blurry")
    assert prepared(sdxl, asked).rows == rows
    assert uses_cfg(asked.params, sdxl.profile("m", 50)) is (rows == 2)


class SwappedPooled(Wrapped):
    """Gives the first two requests each other's pooled embeddings."""

    def denoise_step(self, input_batch: StepInputBatch) -> Sequence[torch.Tensor]:
        pooled = input_batch.pooled_embeds
        assert pooled is not None
        if input_batch.requests > 1:
            input_batch.pooled_embeds = torch.cat([pooled[:2].flip(0), pooled[2:]])
        try:
            return self.inner.denoise_step(input_batch)
        finally:
            input_batch.pooled_embeds = pooled


async def test_pooled_embeddings_swapped_in_a_batch_are_seen(sdxl: StepPipeline) -> None:
    assert furthest(sdxl, await draw_together(SwappedPooled(sdxl), PAIR), BOTH) >= 8


async def test_the_size_steers_the_picture_and_is_told_once(
    sdxl: StepPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = diffusers_pipeline(sdxl)
    told: list[tuple[int, int]] = []
    make = pipe._get_add_time_ids

    def another_size(original: Any, corner: Any, target: Any, **keywords: Any) -> Any:
        told.append(original)
        return make((48, 48), corner, (48, 48), **keywords)

    members = [request("a", height=16), request("b", seed=2, height=16, guidance_scale=1.0)]
    outcomes = await draw_together(sdxl, {0: members})
    assert furthest(sdxl, outcomes, members) <= 1
    monkeypatch.setattr(pipe, "_get_add_time_ids", another_size)
    others = await draw_together(sdxl, {0: members})
    assert told == [(16, 32)] * 3  # once for each row of the one composition
    assert all(worst_difference(outcomes[name], others[name]) >= 8 for name in "ab")  # type: ignore[arg-type]


def test_the_noise_is_as_strong_as_the_requests_own_steps_want_it(sdxl: StepPipeline) -> None:
    few, many = (prepared(sdxl, request("r", num_inference_steps=steps)) for steps in (2, 9))
    assert few.scheduler.init_noise_sigma != many.scheduler.init_noise_sigma
    unscaled = [state.latents / state.scheduler.init_noise_sigma for state in (few, many)]
    assert torch.allclose(*unscaled)


async def test_latents_are_restored_by_the_vaes_mean_and_deviation(
    sdxl: StepPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = draw_solo(sdxl, BOTH[0].params)
    vae = diffusers_pipeline(sdxl).vae
    with_config(monkeypatch, vae, latents_mean=[0.3, -0.2, 0.1, 0.0], latents_std=[0.5, 1.5, 0.7, 0.9])
    outcomes = await draw_together(sdxl, {0: BOTH[:1]})
    assert furthest(sdxl, outcomes, BOTH[:1]) <= 1
    assert worst_difference(plain, draw_solo(sdxl, BOTH[0].params)) >= 8


async def test_the_watermark_is_the_pipelines_own(sdxl: StepPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    class Negative:
        def apply_watermark(self, images: torch.Tensor) -> torch.Tensor:
            return -images

    plain = draw_solo(sdxl, BOTH[0].params)
    monkeypatch.setattr(diffusers_pipeline(sdxl), "watermark", Negative())
    outcomes = await draw_together(sdxl, {0: BOTH[:1]})
    assert furthest(sdxl, outcomes, BOTH[:1]) <= 1
    assert np.array_equal(np.asarray(draw_solo(sdxl, BOTH[0].params)), 255 - np.asarray(plain))


@pytest.mark.filterwarnings("ignore:`upcast_vae` is deprecated:FutureWarning")
async def test_half_precision_decodes_in_float32_and_stays_so(checkpoint: Callable[[str], Path]) -> None:
    folder = str(checkpoint("sdxl"))
    pipeline = load_pipeline(folder, "cpu", "float16")
    asked = request("r", num_inference_steps=2)
    picture = (await draw_together(pipeline, {0: [asked]}))["r"]
    pipe = diffusers_pipeline(pipeline)
    assert (pipe.unet.dtype, pipe.vae.dtype) == (torch.float16, torch.float32)

    alone: Any = StableDiffusionXLStepPipeline(
        diffusers.StableDiffusionXLPipeline.from_pretrained(folder, dtype=torch.float32),
        pipeline.device,
        ServingDefaults(),
    )
    alone._pipe.to(torch.float16)  # as diffusers has it, the VAE too
    assert isinstance(picture, Image.Image)
    assert worst_difference(picture, draw_solo(alone, asked.params)) <= 1


@pytest.mark.parametrize(
    ("component", "changes", "reason"),
    [
        ("unet", {"in_channels": 9}, "inpainting"),
        ("unet", {"time_cond_proj_dim": 32}, "time_cond_proj_dim"),
        ("unet", {"addition_embed_type": None}, "addition_embed_type must be text_time"),
        ("unet", {"class_embed_type": "timestep"}, "does not take the conditions of this pipeline"),
        ("unet", {"encoder_hid_dim_type": "image_proj"}, "encoder_hid_dim_type"),
        ("unet", {"addition_time_embed_dim": 9}, "refiner"),
    ],
)
def test_a_checkpoint_that_wants_more_than_a_prompt_is_refused(
    sdxl: Any, monkeypatch: pytest.MonkeyPatch, component: str, changes: dict[str, Any], reason: str
) -> None:
    with_config(monkeypatch, getattr(sdxl._pipe, component), **changes)
    with pytest.raises(ConfigError, match=reason):
        StableDiffusionXLStepPipeline(sdxl._pipe, sdxl.device, ServingDefaults())


@pytest.mark.parametrize("part", ["text_encoder", "tokenizer_2"])
def test_a_checkpoint_without_one_of_its_text_encoders_is_refused(
    sdxl: Any, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(sdxl._pipe, part, None)
    with pytest.raises(ConfigError, match="text encoders or tokenizers is missing"):
        StableDiffusionXLStepPipeline(sdxl._pipe, sdxl.device, ServingDefaults())


def test_both_encoders_that_cut_a_prompt_are_named(sdxl: StepPipeline) -> None:
    warnings = prepared(sdxl, request("r", negative_prompt="apple " * 300)).warnings
    assert [warning[: warning.index(",")] for warning in warnings] == [
        "negative_prompt is too long for the first CLIP text encoder",
        "negative_prompt is too long for the second CLIP text encoder",
    ]


def test_a_side_that_the_pipeline_refuses_is_refused(sdxl: StepPipeline) -> None:
    with pytest.raises(RequestError, match="divisible by 8"):
        sdxl.prompts(request("r", height=36))


def test_the_profile_is_that_of_the_diffusers_call(sdxl: Any) -> None:
    profile = sdxl.profile("m", 200)
    assert (profile.default_num_inference_steps, profile.default_guidance_scale) == (50, 5.0)
    assert (profile.default_height, profile.default_width) == (32, 32)
    assert (profile.size.multiple, profile.size.min_side, profile.size.max_side) == (8, 8, 2048)
    assert (profile.size.pixels_per_token, profile.mixes) == (2, ("steps", "guidance", "cfg"))
    limited = StableDiffusionXLStepPipeline(sdxl._pipe, sdxl.device, ServingDefaults(max_side=28)).profile("m", 9)
    assert (limited.size.max_side, limited.default_height, limited.default_num_inference_steps) == (24, 24, 9)
