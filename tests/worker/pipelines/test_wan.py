"""Wan's own: videos, and the three kinds of checkpoint, each in a crowd and against the diffusers pipeline alone."""

import asyncio
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import av
import msgspec
import pytest
import torch
from PIL import Image

from common import messages as m
from common.config import WorkerConfig
from common.errors import ConfigError, RequestError
from common.params import DiffusionRequest, OutputParams
from common.rows import row_tokens, uses_cfg
from services.worker.loader import load_pipeline
from services.worker.pipelines.protocol import ServingDefaults, StepPipeline, Video
from services.worker.pipelines.wan import WanStepPipeline
from services.worker.service import serve_worker
from services.worker.side import SideExecutor
from services.worker.state import PromptText
from services.worker.video import read_video_metadata
from tests import builders
from tests.checkpoints.wan import save_wan_euler, save_wan_expanded_timesteps, save_wan_two_transformers
from tests.worker.driving import LONG, Outcome, draw_together, prepared, request
from tests.worker.peers import DEADLINE_S, FakeGateway, FakeScheduler, group, zmq_context
from tests.worker.solo import diffusers_pipeline, draw_solo_frames, worst_difference

VARIANTS = ("wan", "two-transformers", "expanded-timesteps")

# Other texts, seeds, step counts and guidance, on and off, and one that joins late.
CROWD = {
    0: [
        request("guided", seed=1, prompt=LONG, num_frames=5, guidance_scale=7.0, num_inference_steps=7),
        request("unguided", seed=2, prompt="frog", num_frames=5, guidance_scale=1.0, num_inference_steps=5),
    ],
    2: [request("late", seed=3, num_frames=5, negative_prompt="blurry, ugly", guidance_scale=2.5)],
}
EVERYBODY = [member for members in CROWD.values() for member in members]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., StepPipeline]:
    """A tiny checkpoint by its variant and type, loaded once."""
    root = tmp_path_factory.mktemp("wan")
    saves = {
        "euler": save_wan_euler,
        "two-transformers": save_wan_two_transformers,
        "expanded-timesteps": save_wan_expanded_timesteps,
    }
    known: dict[tuple[str, str], StepPipeline] = {}

    def pipeline(variant: str, dtype: str = "float32") -> StepPipeline:
        folder = root / variant
        if not folder.exists():
            saves[variant](folder)
        if (variant, dtype) not in known:
            known[variant, dtype] = load_pipeline(str(folder), "cpu", dtype)
        return known[variant, dtype]

    return pipeline


@pytest.fixture
def wan(tiny: Callable[[str], StepPipeline]) -> StepPipeline:
    return tiny("wan")


@pytest.fixture(params=VARIANTS)
def variant(
    request: pytest.FixtureRequest, wan: StepPipeline, loaded: Callable[[str], StepPipeline]
) -> StepPipeline:
    return wan if request.param == "wan" else loaded(request.param)


def frames_of(outcome: Outcome) -> list[Image.Image]:
    assert isinstance(outcome, Image.Image | Video), outcome
    return outcome.frames if isinstance(outcome, Video) else [outcome]


def furthest(pipeline: StepPipeline, outcomes: dict[str, Outcome], members: Sequence[DiffusionRequest]) -> int:
    """The worst difference of any frame of any member from its solo video."""
    pairs = [(frames_of(outcomes[each.request_id]), draw_solo_frames(pipeline, each.params)) for each in members]
    assert all(len(frames) == each.params.num_frames for (frames, _), each in zip(pairs, members, strict=True))
    return max(worst_difference(*both) for pair in pairs for both in zip(*pair, strict=True))


@pytest.fixture
def rows_of_forwards(variant: StepPipeline) -> Iterator[list[tuple[str, int]]]:
    """Which transformer each forward was one of, and how many rows it had."""
    forwards: list[tuple[str, int]] = []

    def note(name: str) -> Callable[[Any, Any, dict[str, Any]], None]:
        return lambda module, arguments, keywords: forwards.append((name, len(keywords["hidden_states"])))

    pipe = diffusers_pipeline(variant)
    hooks = [
        module.register_forward_pre_hook(note(name), with_kwargs=True)
        for name in ("transformer", "transformer_2")
        if (module := getattr(pipe, name)) is not None
    ]
    yield forwards
    for hook in hooks:
        hook.remove()


async def test_a_video_drawn_in_a_crowd_is_the_video_drawn_alone(
    variant: StepPipeline, rows_of_forwards: list[tuple[str, int]]
) -> None:
    side = variant.profile("m", 50).size.min_side  # one of the variants draws nothing smaller
    crowd = {at: [sized(member, max(side, 32)) for member in members] for at, members in CROWD.items()}
    outcomes = await draw_together(variant, crowd)
    assert max(rows for _, rows in rows_of_forwards) >= 3
    assert furthest(variant, outcomes, [member for members in crowd.values() for member in members]) <= 1


def sized(asked: DiffusionRequest, side: int) -> DiffusionRequest:
    return msgspec.structs.replace(asked, params=msgspec.structs.replace(asked.params, height=side, width=side))


async def test_all_members_share_a_forward(loaded: Callable[[str], StepPipeline]) -> None:
    """With one transformer one forward a step; with two, one for each that some row needs."""
    pipeline = loaded("two-transformers")
    forwards: list[tuple[str, int]] = []
    pipe = diffusers_pipeline(pipeline)
    hooks = [
        getattr(pipe, name).register_forward_pre_hook(
            lambda module, arguments, keywords, name=name: forwards.append((name, len(keywords["hidden_states"]))),
            with_kwargs=True,
        )
        for name in ("transformer", "transformer_2")
    ]
    await draw_together(pipeline, CROWD)
    for hook in hooks:
        hook.remove()
    # Of 7, 5 and 6 steps the first 3, 2 and 2 lie above the boundary.
    assert forwards
