"""diffusers' switches for memory and speed: each does what it does in diffusers, or is refused at the start."""

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline, VQModel
from diffusers.hooks.group_offloading import ModuleGroup
from PIL import Image

from common.config import WorkerConfig
from common.errors import ConfigError
from common.params import DiffusionRequest
from services.worker.loader import load_pipeline, load_whole_pipeline
from services.worker.pipelines.protocol import StepPipeline
from services.worker.pipelines.whole_call import WholeCallPipeline
from services.worker.preparation import Preparation
from services.worker.request_batch import DiffusionRequestBatch, GivenUpError
from services.worker.runner import StepRunner
from services.worker.service import serve_worker
from services.worker.switches import Switches, compile_denoiser, offload_groups, place, refuse_unusable, take_turns
from services.worker.warmup import warm_up
from tests.worker.driving import CROWD, EVERYBODY, draw_together, request
from tests.worker.solo import draw_solo, worst_difference

CPU = torch.device("cpu")
ELSEWHERE = torch.device("cpu:0")  # the same memory by a name that can be told from it: what moves can be seen

Step = Callable[[Switches], StepPipeline]
Whole = Callable[[Switches], WholeCallPipeline]


@pytest.fixture
def step(checkpoint: Callable[[str], Path]) -> Step:
    """A tiny Stable Diffusion of one's own, whose VAE decodes what is wider than 32 pixels in tiles if it may."""
    return lambda switches: load_pipeline(str(checkpoint("sd1")), "cpu", "float32", switches)


@pytest.fixture
def whole(checkpoint: Callable[[str], Path]) -> Whole:
    """The same for request mode."""
    return lambda switches: load_whole_pipeline(str(checkpoint("sd1")), "cpu", "float32", switches)


async def drawn(pipeline: StepPipeline, one: DiffusionRequest) -> Image.Image:
    outcomes = await draw_together(pipeline, {0: [one]})
    picture = outcomes[one.request_id]
    assert isinstance(picture, Image.Image), picture
    return picture


def drawn_whole(pipeline: WholeCallPipeline, *requests: DiffusionRequest) -> list[Image.Image]:
    states = [pipeline.prepare_encode(one) for one in requests]
    for state, picture in zip(states, pipeline.draw(DiffusionRequestBatch(states)), strict=True):
        state.drawn = picture
    return [pipeline.post_decode(state) for state in states]


async def assert_draws_as(reference: StepPipeline, pipeline: StepPipeline) -> None:
    """Everybody's picture in a crowd is what the reference, untouched by switches, draws alone."""
    outcomes = await draw_together(pipeline, CROWD)
    for member in EVERYBODY:
        picture = outcomes[member.request_id]
        assert isinstance(picture, Image.Image), picture
        assert worst_difference(picture, draw_solo(reference, member.params)) <= 1


# VAE tiling and slicing.

WIDE = request("wide", height=48, width=48, num_inference_steps=2)


async def test_a_tiled_decode_is_that_of_diffusers(checkpoint: Callable[[str], Path], step: Step, whole: Whole) -> None:
    pipe = StableDiffusionPipeline.from_pretrained(checkpoint("sd1"), safety_checker=None)
    pipe.set_progress_bar_config(disable=True)
    pipe.vae.enable_tiling()
    tiled = pipe(
        WIDE.params.prompt,
        height=48,
        width=48,
        num_inference_steps=2,
        guidance_scale=WIDE.params.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(WIDE.params.seed),
    ).images[0]
    assert worst_difference(await drawn(step(Switches(vae_tiling=True)), WIDE), tiled) <= 1
    assert worst_difference(drawn_whole(whole(Switches(vae_tiling=True)), WIDE)[0], tiled) <= 1
    assert worst_difference(await drawn(step(Switches()), WIDE), tiled) > 1, "nothing was tiled"


@pytest.mark.parametrize(("slicing", "batches"), [(True, [1, 1]), (False, [2])])
def test_a_calls_pictures_are_decoded_one_by_one_with_slicing(whole: Whole, slicing: bool, batches: list[int]) -> None:
    pipeline = whole(Switches(vae_slicing=slicing))
    seen = []
    pipeline._pipe.vae.decoder.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    both = [request("a", seed=1, num_inference_steps=2), request("b", seed=2, num_inference_steps=2)]
    pictures = drawn_whole(pipeline, *both)
    assert seen == batches
    for picture, one in zip(pictures, both, strict=True):
        assert worst_difference(picture, drawn_whole(pipeline, one)[0]) <= 1


@pytest.mark.parametrize(
    ("switches", "flag"), [(Switches(vae_tiling=True), "--vae-tiling"), (Switches(vae_slicing=True), "--vae-slicing")]
)
def test_a_vae_that_can_not_is_named(switches: Switches, flag: str) -> None:
    class Pipe(SimpleNamespace):
        def to(self, device: torch.device) -> None: ...

    simple = VQModel(block_out_channels=(4,), norm_num_groups=2)
    for pipe, reason in (
        (Pipe(vae=simple), "VAE, a VQModel"),
        (Pipe(vae=torch.nn.Identity()), "an? Identity"),
        (Pipe(), "a Pipe has no VAE"),
    ):
        with pytest.raises(ConfigError, match=f"{flag} can't be used: .*{reason}"):
            place(pipe, CPU, switches, step_execution=True)


# Offload. What it moves can't be seen on a CPU but by the name of the device.


@pytest.mark.parametrize("offload", ["model", "group"])
@pytest.mark.parametrize("load", [load_pipeline, load_whole_pipeline])
def test_on_a_cpu_nothing_can_be_offloaded_and_no_weights_are_read_to_find_out(
    tmp_path: Path, load: Callable[..., Any], offload: Any
) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
    with pytest.raises(ConfigError, match=f"--offload {offload} .*nothing to offload from"):
        load(str(tmp_path), "cpu", "float32", Switches(offload=offload))


async def test_with_group_offload_each_layer_of_denoiser_and_encoders_comes_when_it_is_used(
    step: Step, tiny: Callable[[str], StepPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline: Any = step(Switches())
    pipe = pipeline._pipe
    offload_groups(pipe, ELSEWHERE)
    came: set[torch.nn.Module] = set()
    onload = ModuleGroup.onload_

    def noted(group: ModuleGroup) -> None:
        came.update(group.modules)
        onload(group)

    monkeypatch.setattr(ModuleGroup, "onload_", noted)
    await assert_draws_as(tiny("sd1"), pipeline)
    layers = {
        module
        for part in (pipe.unet, pipe.text_encoder)
        for module in part.modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)
    }
    assert layers <= came
    assert came.isdisjoint(pipe.vae.modules())


class Moves:
    """Which components of a pipeline are on the device, by the calls that move them."""

    def __init__(self, pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.there: set[str] = set()
        self.log: list[tuple[str, str]] = []
        names = {part: name for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
        move = torch.nn.Module.to

        def noted(module: torch.nn.Module, *arguments: Any, **named: Any) -> torch.nn.Module:
            if arguments and isinstance(arguments[0], torch.device) and module in names:
                name, came = names[module], arguments[0] == ELSEWHERE
                self.log.append((name, "comes" if came else "goes"))
                (self.there.add if came else self.there.discard)(name)
            return move(module, *arguments, **named)

        monkeypatch.setattr(torch.nn.Module, "to", noted)


async def test_with_model_offload_the_denoiser_stays_and_the_others_take_turns(
    step: Step, tiny: Callable[[str], StepPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline: Any = step(Switches())
    pipe = pipeline._pipe
    moves = Moves(pipe, monkeypatch)
    take_turns(pipe, ELSEWHERE)
    assert moves.there == {"unet"}
    seen = []
    for name, working in (("unet", pipe.unet), ("text_encoder", pipe.text_encoder), ("vae", pipe.vae.decoder)):
        working.register_forward_hook(lambda *_, name=name: seen.append((name, moves.there - {"unet"})))

    await assert_draws_as(tiny("sd1"), pipeline)
    await drawn(pipeline, request("late", prompt="a purple umbrella", num_inference_steps=2))

    assert {name for name, _ in seen} == {"unet", "text_encoder", "vae"}
    assert all(there == {name} for name, there in seen if name != "unet")
    assert all(len(there) == 1 for _, there in seen)
    assert [move for move in moves.log if move[0] == "unet"] == [("unet", "comes")]
    assert moves.log.count(("text_encoder", "comes")) == 2
    assert pipe._execution_device == ELSEWHERE


def test_a_component_that_finds_no_room_leaves_none_of_itself_there() -> None:
    class Big(torch.nn.Linear):
        def to(self, device: torch.device) -> "Big":  # type: ignore[override]
            moves.append(device)
            if device == ELSEWHERE:
                raise torch.OutOfMemoryError("no room")
            return self

    moves: list[torch.device] = []
    small, big = torch.nn.Linear(2, 2), Big(2, 2)
    take_turns(SimpleNamespace(components={"text_encoder": small, "vae": big, "tokenizer": None}), ELSEWHERE)
    small(torch.zeros(1, 2))
    with pytest.raises(torch.OutOfMemoryError):
        big(torch.zeros(1, 2))
    assert moves == [ELSEWHERE, CPU]
    small(torch.zeros(1, 2))
    with pytest.raises(torch.OutOfMemoryError):
        big(torch.zeros(1, 2))
    assert moves == [ELSEWHERE, CPU] * 2


def test_in_request_mode_model_offload_is_that_of_diffusers(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = whole(Switches())
    pipe = pipeline._pipe
    one = request("a", num_inference_steps=2)
    before = drawn_whole(pipeline, one)[0]
    place(pipe, ELSEWHERE, Switches(offload="model"), step_execution=False)
    assert [type(hook.hook).__name__ for hook in pipe._all_hooks] == ["CpuOffload"] * 3
    assert worst_difference(drawn_whole(pipeline, one)[0], before) == 0
    # A call that is left half-way frees the device as one does that ends.
    moves = Moves(pipe, monkeypatch)
    with pytest.raises(GivenUpError):
        pipeline.draw(DiffusionRequestBatch([pipeline.prepare_encode(one)]), lambda: True)
    assert {name for name, what in moves.log if what == "goes"} == {"unet", "vae", "text_encoder"}


@pytest.mark.parametrize("offload", ["model", "group"])
def test_a_class_that_can_not_be_offloaded_is_named_with_the_reason(
    whole: Whole, monkeypatch: pytest.MonkeyPatch, offload: Any
) -> None:
    pipe = whole(Switches())._pipe
    monkeypatch.setattr(type(pipe), "model_cpu_offload_seq", None)
    monkeypatch.setattr(pipe.unet, "_supports_group_offloading", False, raising=False)
    with pytest.raises(
        ConfigError, match=f"--offload {offload} can't be used with a StableDiffusionPipeline: .*(_seq|support)"
    ):
        place(pipe, ELSEWHERE, Switches(offload=offload), step_execution=False)


# Compile. Generating code takes long on a CPU, so graphs are run as they were traced.


@pytest.fixture
def dynamo() -> Iterator[Any]:
    """What torch counts while it compiles, from nothing on."""
    from torch._dynamo.utils import counters
    from torch.fx.experimental import _config as shapes

    limit, duck_shape = torch._dynamo.config.recompile_limit, shapes.use_duck_shape
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit, shapes.use_duck_shape = limit, duck_shape


async def test_a_compiled_denoiser_draws_the_same_and_is_compiled_before_anybody_is_served(
    checkpoint: Callable[[str], Path], tiny: Callable[[str], StepPipeline], dynamo: Any
) -> None:
    # Its default picture has as many image tokens as its texts are wide: torch must not think that this is always so.
    reference = tiny("sdxl")
    pipeline: Any = load_pipeline(str(checkpoint("sdxl")), "cpu", "float32")
    compile_denoiser(pipeline._pipe, backend="eager")
    with torch.inference_mode():
        warm_up(pipeline, Preparation(pipeline), StepRunner(pipeline, threads=1), pipeline.profile("x", 200))
    graphs = dynamo["stats"]["unique_graphs"]
    assert 0 < graphs < 8
    await assert_draws_as(reference, pipeline)
    alone = request("alone", guidance_scale=1.0, height=48, width=16, num_inference_steps=2)
    for one in (WIDE, alone):
        assert worst_difference(await drawn(pipeline, one), draw_solo(reference, one.params)) <= 1
    assert dynamo["stats"]["unique_graphs"] == graphs, "a request waited for the compiler"


def test_a_machine_without_a_compiler_ends_the_start(
    checkpoint: Callable[[str], Path], dynamo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # what is compiled already needs no compiler
    with (
        config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(ConfigError, match=r"--compile can't be used: .* a C\+\+ compiler .*no-such-compiler"),
    ):
        load_pipeline(str(checkpoint("sd1")), "cpu", "float32", Switches(compile=True))


def test_a_compiler_that_works_is_no_reason(dynamo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    refuse_unusable(Switches(compile=True), CPU)
    assert dynamo["stats"]["unique_graphs"] == 1, "nothing was compiled"


def test_a_denoiser_whose_blocks_diffusers_does_not_name_is_not_compiled(checkpoint: Callable[[str], Path]) -> None:
    pipe = load_pipeline(str(checkpoint("sd3")), "cpu", "float32")._pipe  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"--compile can't be used: .* of a SD3Transformer2DModel"):
        place(pipe, CPU, Switches(compile=True), step_execution=True)
    with pytest.raises(ConfigError, match=r"--compile can't be used: .* has no unet or transformer"):
        compile_denoiser(SimpleNamespace(prior=torch.nn.Identity()))


# From the settings to the model.


@pytest.mark.parametrize("step_execution", [True, False])
async def test_the_workers_settings_reach_the_loader(step_execution: bool) -> None:
    asked: list[Any] = []

    def load(*arguments: Any) -> Any:
        asked.extend(arguments)
        raise ConfigError("enough")

    config = WorkerConfig(
        model="m", vae_tiling=True, offload="model", compile=True, dtype="float16", step_execution=step_execution
    )
    with contextlib.suppress(ConfigError):
        await serve_worker(config, load)
    assert asked == ["m", "auto", "float16", Switches(vae_tiling=True, offload="model", compile=True)]
