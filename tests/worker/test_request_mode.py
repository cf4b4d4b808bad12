"""Request mode: pipelines served by their whole call, each picture as the diffusers pipeline draws it alone."""

import asyncio
import contextlib
import io
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from diffusers.pipelines.animatediff.pipeline_output import AnimateDiffPipelineOutput
from PIL import Image

from common import messages as m
from common.config import WorkerConfig
from common.errors import ConfigError, ErrorInfo, RequestError
from common.params import DiffusionRequest
from services.worker import halving
from services.worker.loader import load_whole_pipeline
from services.worker.pipelines.protocol import ServingDefaults
from services.worker.pipelines.whole_call import WholeCallPipeline, refuse_unservable
from services.worker.request_batch import DiffusionRequestBatch, Drawn, RequestState, parts
from services.worker.request_runner import RequestRunner
from services.worker.request_warmup import Proven, prove
from services.worker.runner import GroupOutcome
from services.worker.service import serve_worker
from tests.checkpoints.pixart_sigma import save_pixart
from tests.checkpoints.stable_diffusion import save_lcm, save_sd1_ancestral
from tests.checkpoints.stable_diffusion_3 import save_sd3
from tests.checkpoints.stable_diffusion_xl import save_sdxl
from tests.worker.driving import LONG, request
from tests.worker.peers import DEADLINE_S, FakeGateway, FakeScheduler, group, zmq_context
from tests.worker.solo import worst_difference

CPU = torch.device("cpu")
WHOLE: dict[str, Callable[[Path], Path]] = {
    "sdxl": save_sdxl,
    "pixart": save_pixart,
    "lcm": save_lcm,
    "sd1-ancestral": save_sd1_ancestral,  # has a step pipeline too; its solver draws noise at every step
}
SIZES = {"pixart": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("whole")
    return lambda name: root / name if (root / name).exists() else WHOLE[name](root / name)


@pytest.fixture(scope="module")
def whole(folder: Callable[[str], Path]) -> Callable[[str], WholeCallPipeline]:
    """A checkpoint by its name, loaded for request mode; each once."""
    loaded: dict[str, WholeCallPipeline] = {}

    def pipeline(name: str) -> WholeCallPipeline:
        if name not in loaded:
            loaded[name] = load_whole_pipeline(str(folder(name)), "cpu", "float32")
        return loaded[name]

    return pipeline


@pytest.fixture(scope="module")
def sdxl(whole: Callable[[str], WholeCallPipeline]) -> WholeCallPipeline:
    return whole("sdxl")


def proven(pipeline: WholeCallPipeline) -> Proven:
    with torch.inference_mode():
        return prove(pipeline, "x", 200, 8)


def runner_of(pipeline: Any, together: bool = True) -> RequestRunner:
    return RequestRunner(pipeline, pipeline.profile("x", 200, 32, 32, other_sizes=True), together)


def run(pipeline: Any, requests: Sequence[DiffusionRequest], **options: Any) -> tuple[list[RequestState], GroupOutcome]:
    """The requests as one group of a plan."""
    runner = runner_of(pipeline)
    with torch.inference_mode():
        states = [pipeline.prepare_encode(each) for each in requests]
        for state in states:
            runner.add(state)
        return states, runner.run_group(states, **options)


def solo(pipeline: WholeCallPipeline, each: DiffusionRequest) -> Image.Image:
    """By the diffusers pipeline alone."""
    params = each.params
    negative = {} if params.negative_prompt is None else {"negative_prompt": params.negative_prompt}
    image: Image.Image = pipeline._pipe(
        params.prompt,
        height=params.height,
        width=params.width,
        num_inference_steps=params.num_inference_steps,
        guidance_scale=params.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(params.seed),
        **negative,
    ).images[0]
    return image


def assert_solo(pipeline: WholeCallPipeline, state: RequestState) -> None:
    picture = pipeline.post_decode(state)
    assert worst_difference(picture, solo(pipeline, state.request)) <= 1


class Calls:
    """A `WholeCallPipeline` that does what another does and notes whom each call is for. Tests override `before`."""

    def __init__(self, inner: WholeCallPipeline) -> None:
        self.inner = inner
        self.device = inner.device
        self.profile, self.prepare_encode, self.post_decode = inner.profile, inner.prepare_encode, inner.post_decode
        self.calls: list[list[str]] = []

    def before(self, ids: list[str]) -> None:
        """What happens before a call; nothing."""

    def draw(self, batch: DiffusionRequestBatch, *options: Any) -> list[Drawn]:
        ids = [state.request_id for state in batch.states]
        self.calls.append(ids)
        self.before(ids)
        return self.inner.draw(batch, *options)


# ---- pictures


@pytest.mark.parametrize("name", WHOLE)
def test_each_picture_of_a_batch_is_that_of_diffusers_alone(
    whole: Callable[[str], WholeCallPipeline], name: str
) -> None:
    pipeline = Calls(whole(name))
    side = SIZES.get(name, 32)
    crowd = [
        request(str(index), prompt=prompt, seed=20 + index, num_inference_steps=4, height=side, width=side)
        for index, prompt in enumerate(("frog", LONG, "blue bicycle"))
    ]
    states, outcome = run(pipeline, crowd)
    assert pipeline.calls == [["0", "1", "2"]]
    assert outcome.advanced == states
    assert [state.step_index for state in states] == [1, 1, 1]
    for state in states:
        assert_solo(pipeline.inner, state)


def test_other_parameters_never_share_a_call_whatever_the_plan_says(sdxl: WholeCallPipeline) -> None:
    pipeline = Calls(sdxl)
    crowd = [
        request("a", seed=1),
        request("steps", seed=2, num_inference_steps=3),
        request("size", seed=3, width=48),
        request("guidance", seed=4, guidance_scale=2.0),
        request("negative", seed=5, negative_prompt="blurry"),
        request("b", seed=6, prompt="frog"),
        request("other negative", seed=7, negative_prompt="an ugly watermark"),
    ]
    states, outcome = run(pipeline, crowd)
    assert pipeline.calls == [["a", "b"], ["steps"], ["size"], ["guidance"], ["negative", "other negative"]]
    assert (len(outcome.advanced), outcome.failed) == (7, [])
    assert outcome.rows == 14
    for state in states:
        assert_solo(sdxl, state)


def test_one_at_a_time_where_a_call_can_not_be_shared(sdxl: WholeCallPipeline) -> None:
    states = [sdxl.prepare_encode(request(name)) for name in "abc"]
    assert parts(states, together=False) == [[state] for state in states]
    assert parts(states, together=True) == [states]


def test_the_bytes_are_those_of_diffusers_own_pictures(sdxl: WholeCallPipeline) -> None:
    states, _ = run(sdxl, [request("a", seed=3)])
    assert sdxl.post_decode(states[0]).tobytes() == solo(sdxl, states[0].request).tobytes()
    assert states[0].drawn is None


def test_a_text_that_is_cut_is_told(sdxl: WholeCallPipeline) -> None:
    (warning, _) = sdxl.prepare_encode(request("a", prompt=LONG)).warnings
    assert warning.startswith("prompt is too long for tokenizer, which takes 24 tokens")


# ---- one request's trouble is its own

CROWD = [request("a", seed=1), request("culprit", seed=2), request("b", seed=3, prompt="frog"), request("c", seed=4)]


def ends(pipeline: Calls, states: list[RequestState], outcome: GroupOutcome) -> ErrorInfo:
    """How the culprit ended; everybody else's picture is checked."""
    for state in states:
        if state.request_id != "culprit":
            assert_solo(pipeline.inner, state)
    ((state, error),) = outcome.failed
    assert state.request_id == "culprit"
    return error


def test_a_call_that_fails_is_halved_until_the_one_at_fault_is_alone(sdxl: WholeCallPipeline) -> None:
    class Faulty(Calls):
        def before(self, ids: list[str]) -> None:
            if "culprit" in ids:
                raise RuntimeError("poison")

    pipeline = Faulty(sdxl)
    error = ends(pipeline, *run(pipeline, CROWD))
    assert (error.code, error.message) == ("generation_failed", "the pipeline failed: RuntimeError: poison")
    assert pipeline.calls == [["a", "culprit", "b", "c"], ["a", "culprit"], ["a"], ["culprit"], ["b", "c"]]


def test_a_batch_that_does_not_fit_is_halved_and_memory_is_given_back(
    sdxl: WholeCallPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tight(Calls):
        def before(self, ids: list[str]) -> None:
            if len(ids) > 2:
                raise torch.OutOfMemoryError("no room for three")

    released: list[torch.device] = []
    monkeypatch.setattr(halving, "release_cached_memory", released.append)
    pipeline = Tight(sdxl)
    states, outcome = run(pipeline, CROWD)
    assert (len(outcome.advanced), released) == (4, [CPU])
    for state in states:
        assert_solo(sdxl, state)


def test_a_request_that_does_not_fit_alone(sdxl: WholeCallPipeline) -> None:
    class Tight(Calls):
        def before(self, ids: list[str]) -> None:
            if "culprit" in ids:
                raise torch.OutOfMemoryError("no room")

    pipeline = Tight(sdxl)
    assert ends(pipeline, *run(pipeline, CROWD)).code == "out_of_memory"


def test_a_broken_device_ends_the_worker_and_no_single_request(sdxl: WholeCallPipeline) -> None:
    class Broken(Calls):
        def before(self, ids: list[str]) -> None:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError):
        run(Broken(sdxl), CROWD)


def refusal(pipeline: WholeCallPipeline, state: RequestState) -> ErrorInfo:
    with pytest.raises(RequestError) as refused:
        pipeline.post_decode(state)
    return refused.value.info


def test_what_is_no_number_in_one_picture_fails_that_one(
    sdxl: WholeCallPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae = sdxl._pipe.vae
    decode = vae.decode

    def spoilt(latents: torch.Tensor, *args: Any, **options: Any) -> Any:
        latents[1] = float("nan")
        return decode(latents, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(vae, "decode", spoilt)
        states, _ = run(sdxl, CROWD)
    assert refusal(sdxl, states[1]).code == "non_finite"
    for state in (states[0], *states[2:]):
        assert_solo(sdxl, state)


def test_a_picture_that_the_safety_checker_flags_is_refused(
    whole: Callable[[str], WholeCallPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = whole("sd1-ancestral")

    def checker(images: torch.Tensor, *_: Any) -> tuple[torch.Tensor, list[bool]]:
        return torch.cat([images[:1], torch.zeros_like(images[1:])]), [False] + [True] * (len(images) - 1)

    monkeypatch.setattr(pipeline._pipe, "run_safety_checker", checker)
    states, _ = run(pipeline, CROWD[:2])
    assert pipeline.post_decode(states[0]).size == (32, 32)
    assert refusal(pipeline, states[1]).code == "content_policy_violation"


def test_a_picture_of_another_size_than_asked_for_is_said(sdxl: WholeCallPipeline) -> None:
    state = sdxl.prepare_encode(request("a", width=48))
    state.drawn = Drawn(np.zeros((32, 32, 3), dtype=np.float32), False)
    error = refusal(sdxl, state)
    assert (error.code, error.param) == ("generation_failed", "size")
    assert "drew 32x32 pixels where 48x32 were asked for" in error.message


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("lcm", {"negative_prompt": "blurry"}, "negative_prompt"),
        ("sdxl", {"true_cfg_scale": 2.0}, "true_cfg_scale"),
        ("sdxl", {"max_sequence_length": 20}, "max_sequence_length"),
        ("pixart", {"strength": 0.5}, "strength"),
    ],
)
def test_what_the_call_does_not_take_is_refused_with_its_field(
    whole: Callable[[str], WholeCallPipeline], name: str, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(RequestError) as refused:
        whole(name).prepare_encode(request("a", **changes))
    assert (refused.value.info.code, refused.value.info.param) == ("invalid_request", field)


# ---- calls that nobody waits for


def test_a_call_is_left_half_way_once_all_have_left(sdxl: WholeCallPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def given_up(state: RequestState) -> bool:
        asked.append(state.request_id)
        return len(asked) > 12  # some denoise steps in

    monkeypatch.setattr(sdxl._pipe.vae, "decode", lambda *_, **__: pytest.fail("it was drawn to its end"))
    states, outcome = run(sdxl, [request(name, num_inference_steps=50) for name in "ab"], given_up=given_up)
    assert (outcome.advanced, outcome.failed) == ([], [])
    assert [state.step_index for state in states] == [0, 0]
    assert len(asked) < 20


def test_as_long_as_one_waits_the_call_goes_on(sdxl: WholeCallPipeline) -> None:
    pipeline = Calls(sdxl)
    states, outcome = run(pipeline, CROWD[:3], given_up=lambda state: state.request_id == "culprit")
    assert pipeline.calls == [["a", "b"]]
    assert outcome.advanced == [states[0], states[2]]


# ---- which pipelines can be served, and how


def test_the_profile_is_that_of_the_call(whole: Callable[[str], WholeCallPipeline]) -> None:
    sdxl, pixart = proven(whole("sdxl")), proven(whole("pixart"))
    assert sdxl.together
    assert (sdxl.profile.pipeline, sdxl.profile.mixes) == ("StableDiffusionXLPipeline", ())
    assert (sdxl.profile.default_height, sdxl.profile.default_width, sdxl.profile.size.multiple) == (32, 32, 8)
    assert (sdxl.profile.default_num_inference_steps, sdxl.profile.default_guidance_scale) == (50, 5.0)
    assert sdxl.cost.floor_s > 0
    assert sdxl.cost.per_token_s > 0
    assert (pixart.profile.accepts, pixart.profile.default_max_sequence_length) == (("max_sequence_length",), 300)
    assert (pixart.profile.default_width, pixart.profile.size.multiple) == (256, 16)


def test_a_serving_defaults_file_counts(sdxl: WholeCallPipeline) -> None:
    defaults = ServingDefaults(default_num_inference_steps=9, default_guidance_scale=1.0, max_side=40)
    profile = WholeCallPipeline(sdxl._pipe, CPU, defaults).profile("x", 200, 32, 32, other_sizes=True)
    assert (profile.default_num_inference_steps, profile.default_guidance_scale, profile.size.max_side) == (9, 1.0, 40)


class Strange(StableDiffusionPipeline):
    """A real pipeline with a whim."""

    def __call__(  # type: ignore[override]
        self,
        prompt: Any = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 7.5,
        generator: Any = None,
        output_type: str = "pil",
    ) -> Any:
        output = super().__call__(
            prompt,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            generator=generator,
            output_type=output_type,
        )
        return self.changed(prompt, output)

    def changed(self, prompt: Any, output: Any) -> Any:
        return output


class BatchShows(Strange):
    def changed(self, prompt: Any, output: Any) -> Any:
        if isinstance(prompt, list):
            output.images = output.images * 0.9
        return output


class OneGenerator(Strange):
    def changed(self, prompt: Any, output: Any) -> Any:
        if isinstance(prompt, list):
            raise TypeError("a list of generators is not supported")
        return output


class Fickle(Strange):
    def changed(self, prompt: Any, output: Any) -> Any:
        noise = torch.rand(1).item() * 0.5  # of the generator that all share
        images = [np.asarray(image, dtype=np.float32) for image in output.images]
        scale = 255 if images[0].max() > 1 else 1
        output.images = np.stack([image / scale * noise for image in images])
        return output


class ManyPictures(Strange):
    def changed(self, prompt: Any, output: Any) -> Any:
        output.images = [*output.images, *output.images]
        return output


class Film(Strange):
    def changed(self, prompt: Any, output: Any) -> Any:
        return AnimateDiffPipelineOutput(frames=output.images)


class WrongOrder(Strange):
    def changed(self, prompt: Any, output: Any) -> Any:
        output.images = output.images[::-1]
        return output


class Refuses(Strange):
    """Its safety checker refuses all, so what comes out shows nothing of what was drawn."""

    def changed(self, prompt: Any, output: Any) -> Any:
        output.nsfw_content_detected = [True] * len(output.images)
        return output


class Monotonous(Strange):
    def changed(self, prompt: Any, output: Any) -> Any:
        output.images = [np.full_like(np.asarray(image), 0) for image in output.images]
        return output


class Sized(StableDiffusionPipeline):
    """Takes sizes and negative prompts; tests override what it makes of them."""

    drawn_size: tuple[int, int] | None = None  # whatever is asked for
    pads_negative_prompts = False  # to the longest, so that a batch's pictures depend on one another

    def __call__(  # type: ignore[override]
        self,
        prompt: Any = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 7.5,
        negative_prompt: Any = None,
        generator: Any = None,
        output_type: str = "pil",
    ) -> Any:
        if self.drawn_size is not None:
            height, width = self.drawn_size
        if self.pads_negative_prompts and isinstance(negative_prompt, list):
            longest = max(map(len, negative_prompt))
            negative_prompt = [text.ljust(longest, "x") for text in negative_prompt]
        return super().__call__(
            prompt,
            height=height,
            width=width,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            negative_prompt=negative_prompt,
            generator=generator,
            output_type=output_type,
        )


class Rounds(Sized):
    drawn_size = (32, 32)


class Pads(Sized):
    pads_negative_prompts = True


def strange(kind: type[Strange], whole: Callable[[str], WholeCallPipeline]) -> WholeCallPipeline:
    parts = whole("sd1-ancestral")._pipe.components
    return WholeCallPipeline(kind(**parts, requires_safety_checker=False), CPU, ServingDefaults())


@pytest.mark.parametrize("kind", [BatchShows, OneGenerator, WrongOrder, Refuses, Monotonous])
def test_a_pipeline_whose_batch_changes_its_pictures_is_served_one_at_a_time(
    whole: Callable[[str], WholeCallPipeline], kind: type[Strange], capsys: pytest.CaptureFixture[str]
) -> None:
    assert proven(strange(Strange, whole)).together
    assert not proven(strange(kind, whole)).together
    said = capsys.readouterr().out
    assert "requests are drawn one at a time" in said
    assert kind.__name__ in said


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Fickle, "the same seed gives another picture each time"),
        (ManyPictures, "2 pictures for 1 prompts"),
        (Film, "gives no images but a AnimateDiffPipelineOutput with frames"),
    ],
)
def test_a_pipeline_that_does_not_give_one_picture_again_and_again_is_refused(
    whole: Callable[[str], WholeCallPipeline], kind: type[Strange], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"this {kind.__name__} can't be served by its whole call: .*{reason}"):
        proven(strange(kind, whole))


def test_a_pipeline_whose_call_takes_no_size_draws_one(whole: Callable[[str], WholeCallPipeline]) -> None:
    size = proven(strange(Strange, whole)).profile.size
    assert (size.min_side, size.max_side, size.multiple) == (32, 32, 32)


def sized(kind: type[Sized], whole: Callable[[str], WholeCallPipeline], **defaults: Any) -> WholeCallPipeline:
    parts = whole("sd1-ancestral")._pipe.components
    return WholeCallPipeline(kind(**parts, requires_safety_checker=False), CPU, ServingDefaults(**defaults))


def test_a_pipeline_that_draws_another_size_than_asked_for_has_one_size(
    whole: Callable[[str], WholeCallPipeline], capsys: pytest.CaptureFixture[str]
) -> None:
    own = proven(sized(Sized, whole)).profile.size
    assert own.min_side < own.max_side
    size = proven(sized(Rounds, whole)).profile.size
    assert (size.min_side, size.max_side, size.max_pixels) == (32, 32, 32 * 32)
    assert "one size is served" in capsys.readouterr().out


def test_guidance_is_proven_too_where_it_is_off_by_default(
    whole: Callable[[str], WholeCallPipeline], capsys: pytest.CaptureFixture[str]
) -> None:
    assert proven(sized(Sized, whole, default_guidance_scale=1.0)).together
    assert not proven(sized(Pads, whole, default_guidance_scale=1.0)).together
    assert "a picture differs" in capsys.readouterr().out


def test_a_call_that_fails_leaves_the_pipeline_as_it_was(folder: Callable[[str], Path]) -> None:
    """SDXL decodes in float32 and goes back to half precision only where that went well."""
    pipeline = load_whole_pipeline(str(folder("sdxl")), "cpu", "float16")
    vae = pipeline._pipe.vae
    assert (vae.dtype, vae.config.force_upcast) == (torch.float16, True)
    decode = vae.decode

    def fails_for_several(latents: torch.Tensor, *args: Any, **options: Any) -> Any:
        if len(latents) > 1:
            raise torch.OutOfMemoryError("as the test wanted")
        return decode(latents, *args, **options)

    vae.decode = fails_for_several
    states, outcome = run(pipeline, [request("a"), request("b", seed=2)])
    assert (outcome.advanced, outcome.failed) == (states, [])
    assert vae.dtype == torch.float16


def index_of(tmp_path: Path, name: Any) -> str:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("DDPMPipeline", "it takes no prompt"),
        ("DiTPipeline", "it needs more than a prompt: its call can't do without class_labels"),
        ("StableDiffusionImageVariationPipeline", "it needs an input image: its call can't do without image"),
        ("StableVideoDiffusionPipeline", "it needs an input image"),
        ("KandinskyV22Pipeline", "it needs what another pipeline makes"),
        ("WanPipeline", "it draws videos: its call takes num_frames"),
        ("UnCLIPPipeline", "it takes no num_inference_steps"),
        ("NoSuchPipeline", "no pipeline of that name"),
        ("AutoencoderKL", "no pipeline of that name"),
        (["own_pipeline", "OwnPipeline"], "code of its own"),
    ],
)
def test_a_class_that_can_not_be_served_is_refused_before_its_weights_are_loaded(
    tmp_path: Path, name: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_whole_pipeline(index_of(tmp_path, name))


def test_an_optional_input_image_that_is_needed_all_the_same(folder: Callable[[str], Path], tmp_path: Path) -> None:
    source = folder("sd1-ancestral")
    index = json.loads((source / "model_index.json").read_text())
    for part in source.iterdir():
        if part.is_dir():
            (tmp_path / part.name).symlink_to(part)
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"_class_name": "StableDiffusionImg2ImgPipeline"}))
    pipeline = load_whole_pipeline(str(tmp_path), "cpu", "float32")
    with pytest.raises(ConfigError, match="it needs an input image: without one its call failed with"):
        proven(pipeline)


def test_a_call_without_a_generator_is_refused() -> None:
    class Seedless(StableDiffusionPipeline):
        def __call__(self, prompt: Any = None, num_inference_steps: int = 50, output_type: str = "pil") -> Any:  # type: ignore[override]
            raise AssertionError

    with pytest.raises(ConfigError, match="no picture could be made again from its seed"):
        refuse_unservable(Seedless)


# ---- as a scheduler and a gateway see it


class Gate(Calls):
    """Calls wait until the test opens it, once for each."""

    def __init__(self, inner: WholeCallPipeline) -> None:
        super().__init__(inner)
        self.begun = threading.Semaphore(0)
        self.permits = threading.Semaphore(0)

    def draw(self, batch: DiffusionRequestBatch, *options: Any, **keywords: Any) -> list[Drawn]:
        if batch.states[0].request_id.startswith("warm-up"):
            return self.inner.draw(batch, *options, **keywords)
        self.begun.release()
        assert self.permits.acquire(timeout=DEADLINE_S), "the test gave no permit"
        return super().draw(batch, *options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def in_call(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, timeout=DEADLINE_S)


@contextlib.asynccontextmanager
async def worker(pipeline: Gate) -> AsyncIterator[tuple[FakeScheduler, FakeGateway, asyncio.Task[None]]]:
    async with zmq_context() as context:
        scheduler, gateway = FakeScheduler(context), FakeGateway(context)
        config = WorkerConfig(
            model="m", served_model_name="demo", scheduler=scheduler.address, threads=1, step_execution=False
        )
        task = asyncio.create_task(serve_worker(config, lambda *_: pipeline))
        try:
            yield scheduler, gateway, task
        finally:
            pipeline.permits.release(1_000)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(task, DEADLINE_S)
            scheduler.close()
            gateway.close()


def news(gateway: FakeGateway, *names: str, **changes: Any) -> tuple[m.NewRequest, ...]:
    requests = [request(name, seed=index, **changes) for index, name in enumerate(names)]
    return tuple(m.NewRequest(msgspec.structs.replace(each, home=gateway.home), 1) for each in requests)


async def test_a_request_has_one_step_and_one_that_comes_meanwhile_waits_for_the_next_call(
    sdxl: WholeCallPipeline,
) -> None:
    pipeline = Gate(sdxl)
    async with worker(pipeline) as (scheduler, gateway, _):
        hello = await scheduler.greeted()
        assert (hello.step_execution, hello.limits.max_num_seqs) == (False, 8)
        assert hello.profile.mixes == ()
        first, late = news(gateway, "a", "b"), news(gateway, "late")
        scheduler.plan(new=first)
        await scheduler.first(m.RequestReady, lambda ready: ready.request_id == "b")
        assert {(r.step_index, r.total_steps) for r in scheduler.messages(m.RequestReady)} == {(0, 1)}
        scheduler.plan(group(("a", 1), ("b", 1)))
        await pipeline.in_call()
        scheduler.plan(new=late)
        await scheduler.first(m.RequestReady, lambda ready: ready.request_id == "late")
        scheduler.plan(group(("late", 1)), starts="next_boundary")
        pipeline.permits.release(2)
        await scheduler.until(lambda: len(scheduler.messages(m.RequestDone)) == 3)
        assert pipeline.calls == [["a", "b"], ["late"]]
        assert {done.outcome for done in scheduler.messages(m.RequestDone)} == {"completed"}
        for new in (*first, *late):
            picture = Image.open(io.BytesIO(gateway.pictures(new.request.request_id)[0]))
            assert worst_difference(picture, solo(sdxl, new.request)) <= 1


async def test_a_call_whose_members_are_all_released_is_left_and_the_next_one_begins(
    sdxl: WholeCallPipeline,
) -> None:
    pipeline = Gate(sdxl)
    async with worker(pipeline) as (scheduler, gateway, _):
        await scheduler.greeted()
        scheduler.plan(new=news(gateway, "a", "b", num_inference_steps=200))
        await scheduler.first(m.RequestReady, lambda ready: ready.request_id == "b")
        scheduler.plan(group(("a", 1), ("b", 1)))
        await pipeline.in_call()
        released = tuple(m.ReleasedRequest(name, 1, "aborted") for name in "ab")
        scheduler.plan(released=released, new=news(gateway, "c"))
        await scheduler.first(m.RequestReady, lambda ready: ready.request_id == "c")
        scheduler.plan(group(("c", 1)), starts="next_boundary")
        pipeline.permits.release(2)
        done = await scheduler.first(m.RequestDone)
        assert done.request_id == "c"
        progressed = [each.request_id for result in scheduler.messages(m.StepResult) for each in result.progress]
        assert progressed == ["c"]


async def test_a_worker_that_is_told_to_stop_leaves_its_call(
    sdxl: WholeCallPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Gate(sdxl)
    pipeline.permits.release()
    async with worker(pipeline) as (scheduler, gateway, task):
        await scheduler.greeted()
        decoded: list[object] = []
        monkeypatch.setattr(sdxl._pipe.vae, "decode", lambda *_, **__: decoded.append(_))
        scheduler.plan(new=news(gateway, "a", num_inference_steps=200))
        await scheduler.first(m.RequestReady)
        scheduler.plan(group(("a", 1)))
        await pipeline.in_call()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, DEADLINE_S)
        assert not any(thread.name == "stepweave-steps" for thread in threading.enumerate())
        assert decoded == []


async def test_where_calls_can_not_be_shared_the_worker_says_so(
    whole: Callable[[str], WholeCallPipeline],
) -> None:
    pipeline = Gate(strange(BatchShows, whole))
    async with worker(pipeline) as (scheduler, gateway, _):
        hello = await scheduler.greeted()
        assert (hello.limits.max_num_seqs, hello.limits.max_residents) == (1, 2)
        pipeline.permits.release(2)
        scheduler.plan(new=news(gateway, "a", "b", guidance_scale=7.5))
        await scheduler.first(m.RequestReady, lambda ready: ready.request_id == "b")
        scheduler.plan(group(("a", 1), ("b", 1)))  # against its limits
        await scheduler.until(lambda: len(scheduler.messages(m.RequestDone)) == 2)
        assert pipeline.calls == [["a"], ["b"]]


def test_a_model_with_a_table_of_positions_is_offered_no_larger_size(tmp_path: Path) -> None:
    pipeline = load_whole_pipeline(str(save_sd3(tmp_path / "sd3", t5=False)), "cpu", "float32")
    side = proven(pipeline).profile.size.max_side
    params = {"width": side, "height": side, "num_inference_steps": 1}
    with torch.inference_mode():
        (drawn,) = pipeline.draw(DiffusionRequestBatch([pipeline.prepare_encode(request("a", **params))]))
        assert drawn.picture.shape == (side, side, 3)
        larger = params | {"width": side + pipeline.grid}
        with pytest.raises(ValueError, match="pos_embed_max_size"):
            pipeline.draw(DiffusionRequestBatch([pipeline.prepare_encode(request("b", **larger))]))
