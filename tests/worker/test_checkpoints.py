"""The tiny checkpoints are worth comparing pictures of."""

from typing import Any

import pytest
import torch

from common.params import DiffusionRequest
from services.worker.pipelines.protocol import StepPipeline
from tests.worker.driving import EVERYBODY, request
from tests.worker.solo import diffusers_pipeline, draw_solo, known_solo, worst_difference


@pytest.mark.parametrize("member", EVERYBODY, ids=lambda member: member.request_id)
def test_a_rounding_error_does_not_move_the_picture(
    pipeline: StepPipeline, monkeypatch: pytest.MonkeyPatch, member: DiffusionRequest
) -> None:
    picture = known_solo(pipeline, member.params)
    pipeline_class = type(diffusers_pipeline(pipeline))
    prepare_latents = pipeline_class.prepare_latents

    def nudged(*arguments: Any, **keywords: Any) -> Any:
        prepared = prepare_latents(*arguments, **keywords)
        latents, *places = prepared if isinstance(prepared, tuple) else (prepared,)
        latents = latents + 1e-6 * torch.randn(latents.shape, generator=torch.Generator().manual_seed(0))
        return (latents, *places) if places else latents

    monkeypatch.setattr(pipeline_class, "prepare_latents", nudged)
    assert worst_difference(picture, draw_solo(pipeline, member.params)) <= 1


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "a green frog under a purple umbrella"},
        {"negative_prompt": "blurry, ugly"},
        {"seed": 9},
        {"num_inference_steps": 4},
        {"guidance_scale": 2.5},
        {"guidance_scale": 1.0},
    ],
    ids=lambda change: "-".join(f"{name}" for name in change),
)
def test_another_request_draws_another_picture(pipeline: StepPipeline, change: dict[str, Any]) -> None:
    picture = known_solo(pipeline, request("r", seed=1).params)
    assert worst_difference(picture, known_solo(pipeline, request("r", **({"seed": 1} | change)).params)) >= 16
