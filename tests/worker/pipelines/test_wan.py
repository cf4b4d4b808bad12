"""Wan's own: videos, and three kinds of checkpoints, each in a crowd and against the diffusers pipeline alone."""

import asyncio
import contextlib
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from diffusers import WanPipeline, WanTransformer3DModel
from msgspec.structs import replace
from PIL import Image

from common import messages as m
from common.config import WorkerConfig
from common.errors import ConfigError, RequestError
from common.params import DiffusionRequest, OutputParams, SchedulerSpec
from common.rows import row_tokens, uses_cfg
from services.worker.loader import load_pipeline
from services.worker.pipelines.protocol import ServingDefaults, StepPipeline, Video
from services.worker.pipelines.solvers import with_own_scheduler
from services.worker.pipelines.wan import WanStepPipeline
from services.worker.service import serve_worker
from services.worker.state import DiffusionRequestState
from services.worker.video import read_video_metadata
from tests import builders
from tests.checkpoints.wan import save_wan_euler, save_wan_expanded_timesteps, save_wan_two_transformers
from tests.worker.driving import LONG, Outcome, Wrapped, draw_together, prepared, request
from tests.worker.peers import DEADLINE_S, FakeGateway, FakeScheduler, group, zmq_context
from tests.worker.solo import diffusers_pipeline, draw_solo_frames, worst_difference

VARIANTS = {
    "euler": save_wan_euler,
    "two-transformers": save_wan_two_transformers,
    "expanded-timesteps": save_wan_expanded_timesteps,
}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> Callable[..., StepPipeline]:
    """A tiny checkpoint by its variant and type; each is built and loaded once."""
    root = tmp_path_factory.mktemp("wan")
    loaded: dict[tuple[str, str], StepPipeline] = {}

    def pipeline(variant: str, dtype: str = "float32") -> StepPipeline:
        folder = checkpoint("wan") if variant == "wan" else root / variant
        if not folder.exists():
            VARIANTS[variant](folder)
        if (variant, dtype) not in loaded:
            loaded[variant, dtype] = load_pipeline(str(folder), "cpu", dtype)
        return loaded[variant, dtype]

    return pipeline


@pytest.fixture
def wan(load: Callable[..., StepPipeline]) -> StepPipeline:
    return load("wan")


def video(request_id: str, **changes: Any) -> DiffusionRequest:
    """A request for a video of a size that all variants draw."""
    return request(request_id, **({"num_frames": 5} | changes))


def frames_of(outcome: Outcome) -> list[Image.Image]:
    assert isinstance(outcome, Image.Image | Video), outcome
    return outcome.frames if isinstance(outcome, Video) else [outcome]


def furthest(pipeline: StepPipeline, outcomes: dict[str, Outcome], members: Sequence[DiffusionRequest]) -> int:
    """The worst difference of any frame of any member from its solo video."""
    worst = 0
    for member in members:
        frames = frames_of(outcomes[member.request_id])
        assert len(frames) == member.params.num_frames
        alone = draw_solo_frames(pipeline, member.params)
        worst = max(worst, *(worst_difference(*pair) for pair in zip(frames, alone, strict=True)))
    return worst


@contextlib.contextmanager
def forwards(pipeline: StepPipeline) -> Iterator[list[tuple[str, int]]]:
    """Which transformer each forward was one of, and its rows."""
    seen: list[tuple[str, int]] = []

    def note(name: str) -> Callable[[Any, Any, dict[str, Any]], None]:
        return lambda module, arguments, keywords: seen.append((name, len(keywords["hidden_states"])))

    pipe = diffusers_pipeline(pipeline)
    hooks = [
        module.register_forward_pre_hook(note(name), with_kwargs=True)
        for name in ("transformer", "transformer_2")
        if (module := getattr(pipe, name)) is not None
    ]
    yield seen
    for hook in hooks:
        hook.remove()


# Other texts, seeds, step counts and guidance, on and off, and one that joins late.
CROWD = {
    0: [
        video("guided", seed=1, prompt=LONG, guidance_scale=7.0, num_inference_steps=7),
        video("unguided", seed=2, prompt="frog", guidance_scale=1.0, num_inference_steps=5),
    ],
    2: [video("late", seed=3, negative_prompt="blurry, ugly", guidance_scale=2.5)],
}
EVERYBODY = [member for members in CROWD.values() for member in members]
ONE = Counter({("transformer", rows): steps for rows, steps in {2: 1, 3: 2, 4: 2, 5: 3}.items()})
# Of the 7, 5 and 6 steps the first 3, 2 and 2 have more noise than the boundary.
TWO = Counter(
    {
        **{("transformer", rows): steps for rows, steps in {2: 1, 3: 2, 4: 1}.items()},
        **{("transformer_2", rows): steps for rows, steps in {1: 1, 2: 1, 3: 1, 4: 2, 5: 1}.items()},
    }
)


@pytest.mark.parametrize(
    ("variant", "expected"), [("wan", ONE), ("euler", ONE), ("two-transformers", TWO), ("expanded-timesteps", ONE)]
)
async def test_a_video_drawn_in_a_crowd_is_the_video_drawn_alone(
    load: Callable[..., StepPipeline], variant: str, expected: Counter[tuple[str, int]]
) -> None:
    pipeline = load(variant)
    with forwards(pipeline) as seen:
        outcomes = await draw_together(pipeline, CROWD)
    assert Counter(seen) == expected
    assert furthest(pipeline, outcomes, EVERYBODY) <= 1


async def test_sizes_and_lengths_that_a_plan_mixes_by_mistake_are_drawn_right(wan: StepPipeline) -> None:
    members = [
        video("video", seed=1),
        video("longer", seed=2, num_frames=9),
        video("picture", seed=3, num_frames=1),
        video("smaller", seed=4, height=16),
        video("short text", seed=5, prompt=LONG, max_sequence_length=12),
    ]
    outcomes = await draw_together(wan, {0: members})
    assert furthest(wan, outcomes, members) <= 1


async def test_the_wrong_one_of_two_transformers_is_seen(load: Callable[..., StepPipeline]) -> None:
    pipeline = load("two-transformers")
    parts = {**diffusers_pipeline(pipeline).components, "transformer_2": None}
    first_alone = WanStepPipeline(WanPipeline(**parts), pipeline.device, ServingDefaults())
    outcomes = await draw_together(first_alone, CROWD)
    assert furthest(pipeline, outcomes, EVERYBODY) >= 8


@pytest.mark.parametrize("variant", ["wan", "euler"])
async def test_in_bfloat16_too_latents_are_rounded_where_diffusers_rounds_them(
    load: Callable[..., StepPipeline], variant: str
) -> None:
    pipeline = load(variant, "bfloat16")
    outcomes = await draw_together(pipeline, CROWD)
    assert furthest(pipeline, outcomes, EVERYBODY) <= 1


def solved_by(name: str, member: DiffusionRequest) -> DiffusionRequest:
    return replace(member, params=replace(member.params, scheduler=SchedulerSpec(name)))


@pytest.mark.parametrize("name", ["FlowMatchHeunDiscreteScheduler", "DPMSolverMultistepScheduler"])
async def test_a_solver_that_a_request_names_beside_the_checkpoints_own(
    wan: StepPipeline, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert name in wan.profile("m", 50).schedulers
    named = solved_by(name, EVERYBODY[0])
    outcomes = await draw_together(wan, {0: [EVERYBODY[1]], 1: [named]})
    assert furthest(wan, outcomes, [EVERYBODY[1]]) <= 1
    pipe = diffusers_pipeline(wan)
    monkeypatch.setattr(pipe, "scheduler", with_own_scheduler(pipe, named.params).scheduler)
    assert furthest(wan, outcomes, [named]) <= 1


async def test_a_solver_that_draws_noise_draws_it_from_the_request(wan: StepPipeline) -> None:
    """The call itself has it drawn from the generator of the process, so there is no reference to compare with."""
    named = solved_by("SASolverScheduler", EVERYBODY[0])
    alone = await draw_together(wan, {0: [named]})
    beside = await draw_together(wan, {0: [solved_by("SASolverScheduler", EVERYBODY[2])], 1: [named]})
    pairs = zip(*(frames_of(outcomes["guided"]) for outcomes in (alone, beside)), strict=True)
    assert max(worst_difference(*pair) for pair in pairs) <= 1


async def test_one_frame_is_a_picture_and_more_are_a_video(load: Callable[..., StepPipeline]) -> None:
    asked = {"num_inference_steps": 1}
    members = [video("picture", num_frames=1, **asked), video("video", **asked)]
    outcomes = await draw_together(load("wan"), {0: members})
    assert isinstance(outcomes["picture"], Image.Image)
    assert isinstance(outcomes["video"], Video)
    assert (len(outcomes["video"].frames), outcomes["video"].frames_per_second) == (5, 16)
    faster = await draw_together(load("expanded-timesteps"), {0: members[1:]})
    assert isinstance(faster["video"], Video)
    assert faster["video"].frames_per_second == 24


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"num_frames": 4}, "num_frames", "one more than a multiple of 4, and is 4"),
        ({"num_frames": 0}, "num_frames", "one more than a multiple of 4, and is 0"),
        ({"num_frames": -3}, "num_frames", "one more than a multiple of 4, and is -3"),
        ({"height": 24}, None, "divisible by 16"),
        ({"width": 48, "height": 40}, None, "divisible by 16"),
    ],
)
def test_what_the_call_would_round_is_refused(
    wan: StepPipeline, changes: dict[str, Any], param: str | None, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        wan.prompts(video("r", **changes))
    assert (refused.value.info.code, refused.value.info.param) == ("invalid_request", param)


def test_a_vae_that_makes_squares_smaller_has_sizes_of_its_own(load: Callable[..., StepPipeline]) -> None:
    pipeline = load("expanded-timesteps")
    assert pipeline.profile("m", 50).size.multiple == 32
    with pytest.raises(RequestError, match="width must be a multiple of 32, and is 48") as refused:
        pipeline.prompts(video("r", width=48))
    assert refused.value.info.param == "width"


@pytest.mark.parametrize("variant", ["wan", "expanded-timesteps"])
@pytest.mark.parametrize(("width", "height", "num_frames"), [(32, 32, 1), (64, 32, 5), (32, 64, 13)])
def test_profile_and_state_agree_on_the_tokens_of_a_row(
    load: Callable[..., StepPipeline], variant: str, width: int, height: int, num_frames: int
) -> None:
    pipeline = load(variant)
    state = prepared(pipeline, video("r", width=width, height=height, num_frames=num_frames))
    assert state.image_tokens == row_tokens(height, width, num_frames, pipeline.profile("m", 50).size)


@pytest.mark.parametrize("guidance_scale", [0.0, 1.0, 1.1, 5.0])
def test_profile_and_state_agree_on_guidance(wan: StepPipeline, guidance_scale: float) -> None:
    asked = video("r", guidance_scale=guidance_scale)
    assert (prepared(wan, asked).rows == 2) is uses_cfg(asked.params, wan.profile("m", 50)) is (guidance_scale > 1.0)


def test_the_profile_has_the_calls_defaults_where_the_checkpoint_has_none(wan: StepPipeline) -> None:
    profile = WanStepPipeline(diffusers_pipeline(wan), wan.device, ServingDefaults()).profile("m", 200)
    assert (profile.default_width, profile.default_height, profile.default_num_frames) == (832, 480, 81)
    assert (profile.default_num_inference_steps, profile.default_guidance_scale) == (50, 5.0)
    assert (profile.default_max_sequence_length, profile.max_sequence_length_limit) == (512, 512)
    assert profile.accepts == ("num_frames", "max_sequence_length", "scheduler")
    small = wan.profile("m", 20)
    assert (small.default_width, small.default_height, small.default_num_frames) == (64, 64, 5)
    assert small.default_num_inference_steps == 20


def test_a_text_is_cut_after_it_is_cleaned(wan: StepPipeline) -> None:
    fits = "  frog \n  &amp;  cat  "
    tokens = len(diffusers_pipeline(wan).tokenizer("frog & cat").input_ids)
    for length, cut in ((tokens, False), (tokens - 1, True)):
        warnings = prepared(wan, video("r", prompt=fits, max_sequence_length=length)).warnings
        assert bool(warnings) is cut
        assert not cut or warnings[0].endswith(f"takes {length} tokens: the last 1 were dropped")


def test_a_schedule_so_long_that_its_first_timesteps_are_equal_starts_with_the_first(wan: StepPipeline) -> None:
    state = prepared(wan, video("r", num_inference_steps=500))
    assert state.timesteps[0] == state.timesteps[1]
    assert state.scheduler.begin_index == 0


async def test_infinity_in_the_latents_is_an_error_though_the_decoder_clamps(wan: StepPipeline) -> None:
    class Infinite(Wrapped):
        def post_decode(self, state: DiffusionRequestState) -> Image.Image | Video:
            state.latents[0, 0, 1, 0, 0] = float("inf")
            return self.inner.post_decode(state)

    outcomes = await draw_together(Infinite(wan), {0: [video("r", num_inference_steps=1)]})
    assert getattr(outcomes["r"], "code", None) == "non_finite"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"transformer": None}, "no transformer for the steps with much noise"),
        ({"boundary_ratio": 0.9}, r"a boundary_ratio \(0.9\), below which transformer_2 takes over"),
    ],
)
def test_a_checkpoint_that_lacks_a_transformer_is_refused(
    wan: StepPipeline, parts: dict[str, Any], message: str
) -> None:
    pipe = WanPipeline(**{**diffusers_pipeline(wan).components, **parts})
    with pytest.raises(ConfigError, match=message):
        WanStepPipeline(pipe, wan.device, ServingDefaults())


def test_a_checkpoint_of_image_to_video_is_refused(wan: StepPipeline) -> None:
    takes_a_picture = WanTransformer3DModel(
        num_attention_heads=1, attention_head_dim=12, text_dim=8, freq_dim=8, ffn_dim=8, num_layers=1, image_dim=8
    )
    pipe = WanPipeline(**{**diffusers_pipeline(wan).components, "transformer": takes_a_picture})
    with pytest.raises(ConfigError, match="needs a picture to begin with"):
        WanStepPipeline(pipe, wan.device, ServingDefaults())


def grey_difference(one: Image.Image, other: Image.Image) -> float:
    """The mean over all pixels; a video file holds brightness at every pixel, colours for squares of four."""
    return float(np.abs(np.asarray(one.convert("L")).astype(int) - np.asarray(other.convert("L")).astype(int)).mean())


async def test_a_worker_delivers_a_video_as_a_file(wan: StepPipeline, checkpoint: Callable[[str], Path]) -> None:
    async with zmq_context() as context:
        scheduler, gateway = FakeScheduler(context), FakeGateway(context)
        config = WorkerConfig(
            model=str(checkpoint("wan")), served_model_name="demo", scheduler=scheduler.address, threads=1
        )
        worker = asyncio.create_task(serve_worker(config, lambda *_: wan))
        try:
            hello = await scheduler.greeted()
            assert (hello.profile.default_num_frames, hello.profile.size.frames_per_token) == (5, 4)
            values = {"prompt": "frog", "height": 64, "width": 32, "num_frames": 9, "seed": 7}
            asked = replace(builders.request("r", home=gateway.home, **values), output=OutputParams("mp4"))
            scheduler.plan(new=(m.NewRequest(asked, 1),))
            await scheduler.first(m.RequestReady)
            scheduler.plan(group(("r", 4)))
            done = await scheduler.first(m.RequestDone)
            assert (done.outcome, done.error) == ("completed", None)
            (output,) = gateway.messages(m.ImageOutput)
            assert (output.output_format, output.width, output.height, output.num_frames) == ("mp4", 32, 64, 9)
            (data,) = gateway.pictures("r")
            assert read_video_metadata(data)["num_frames"] == 9
            with av.open(io.BytesIO(data)) as container:
                frames = [frame.to_image() for frame in container.decode(video=0)]
            alone = draw_solo_frames(wan, asked.params)
            assert max(grey_difference(*pair) for pair in zip(frames, alone, strict=True)) < 5
            assert grey_difference(frames[0], alone[1]) > 15
        finally:
            worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(worker, DEADLINE_S)
            scheduler.close()
            gateway.close()
