"""The loads of `bench.mixing`: who asks for what, who is grouped with whom, and what is counted of a run."""

from typing import Any

import pytest

from bench.asking import MAX_STEPS, guidance_in_words, own_shape, sampling_params
from bench.dummy import DummyPipeline
from bench.group_runs import GroupRuns
from bench.mixing import build_loads, default_shapes, grouped, ways_to_run
from bench.recording import Durations
from bench.workload import Shape
from common.errors import ConfigError, RequestError
from common.messages import CfgRule, ModelProfile, SizeRule
from common.rows import uses_cfg

SHAPES = [Shape(64, 64, 8), Shape(64, 64, 6), Shape(48, 64, 8), Shape(32, 64, 6)]
SCALES = [2.0, 3.0, 4.0, 5.0]


def profile(**changes: Any) -> ModelProfile:
    values: dict[str, Any] = {
        "model": "m",
        "pipeline": "Pipeline",
        "size": SizeRule(multiple=16, min_side=32, max_side=512, max_pixels=512 * 512, pixels_per_token=16),
        "default_height": 64,
        "default_width": 64,
        "default_num_inference_steps": 20,
        "default_guidance_scale": 3.5,
        "max_num_inference_steps": MAX_STEPS,
        "mixes": ("steps", "guidance", "cfg", "resolution"),
    }
    return ModelProfile(**(values | changes))


TRUE_CFG = profile(cfg=CfgRule("true_cfg_scale", 1.0, needs_negative_prompt=True), default_true_cfg_scale=1.0)
ABOVE_ZERO = profile(cfg=CfgRule(threshold=0.0))


@pytest.mark.parametrize("of", [profile(), TRUE_CFG, ABOVE_ZERO])
def test_guidance_is_asked_for_as_the_model_takes_it(of: ModelProfile) -> None:
    asked = sampling_params(of, SHAPES[0], 4.0)
    assert uses_cfg(asked, of)
    assert guidance_in_words(asked, of) == "guidance 4"
    off = sampling_params(of, SHAPES[0], of.cfg.threshold)
    assert not uses_cfg(off, of)
    assert guidance_in_words(off, of) == "no classifier-free guidance"


def test_what_is_not_said_is_the_models_own() -> None:
    params = sampling_params(TRUE_CFG, own_shape(TRUE_CFG))
    assert (params.width, params.height, params.num_inference_steps) == (64, 64, 20)
    assert (params.guidance_scale, params.true_cfg_scale, params.negative_prompt) == (3.5, None, None)


def test_the_default_shapes_are_sizes_that_the_model_draws() -> None:
    assert default_shapes(profile(mixes=("steps",))) == [Shape(64, 64, 20), Shape(64, 64, 15)]
    assert default_shapes(profile()) == [Shape(64, 64, 20), Shape(64, 64, 15), Shape(48, 64, 20), Shape(32, 64, 15)]
    assert default_shapes(profile(default_width=32))[2:] == [Shape(32, 64, 20), Shape(32, 64, 15)]


@pytest.mark.parametrize("of", [profile(), TRUE_CFG, ABOVE_ZERO])
def test_each_load_differs_in_what_it_says(of: ModelProfile) -> None:
    loads = build_loads(of, SHAPES, SCALES, 8)
    sizes = {load: {(each.width, each.height) for each in asked} for load, asked in loads.items()}
    guided = {load: [uses_cfg(each, of) for each in asked] for load, asked in loads.items()}
    scales = {load: {getattr(each, of.cfg.scale_field) for each in asked} for load, asked in loads.items()}
    assert sizes["guidance"] == sizes["cfg"] == {(64, 64)}
    assert sizes["sizes"] == sizes["everything"] == {(64, 64), (48, 64), (32, 64)}
    assert all(guided["guidance"])
    assert all(guided["sizes"])
    assert guided["cfg"] == guided["everything"] == [True, False] * 4
    assert (len(scales["guidance"]), len(scales["cfg"]), len(scales["sizes"])) == (4, 2, 1)
    assert scales["everything"] == {*SCALES, of.cfg.threshold}
    for asked in loads.values():
        assert {each.num_inference_steps for each in asked} == {8, 6}
        assert len({each.seed for each in asked}) == 8


def test_a_scale_that_turns_guidance_off_is_refused() -> None:
    with pytest.raises(ConfigError, match="--guidance 1 turns guidance off; on this model it is on above 1"):
        build_loads(profile(), SHAPES, [4.0, 1.0], 8)
    build_loads(ABOVE_ZERO, SHAPES, [4.0, 1.0], 8)


@pytest.mark.parametrize("of", [profile(), TRUE_CFG, ABOVE_ZERO])
def test_homogeneous_groups_differ_in_steps_alone(of: ModelProfile) -> None:
    ways = ways_to_run(of, build_loads(of, SHAPES, SCALES, 8), None)
    groups = {load: len(of_load["in turns"][0]) for load, of_load in ways.items()}
    assert groups == {"guidance": 4, "cfg": 2, "sizes": 3, "everything": 7}
    for of_load in ways.values():
        assert [len(stage) for stage in of_load["mixed"]] == [1]
        assert [len(stage) for stage in of_load["one by one"]] == [1] * len(of_load["in turns"][0])
        for group in of_load["in turns"][0]:
            assert len({(each.width, each.height, uses_cfg(each, of)) for each in group}) == 1
        pictures = {way: sorted(p.seed for s in stages for g in s for p in g) for way, stages in of_load.items()}
        assert pictures["mixed"] == pictures["in turns"] == pictures["one by one"]


def test_a_model_that_does_not_mix_sizes_has_a_group_for_each() -> None:
    one_size_only = profile(mixes=("steps", "guidance", "cfg"))
    loads = build_loads(one_size_only, SHAPES, SCALES, 8)
    assert len(grouped(loads["everything"], one_size_only)) == 3


def test_a_load_without_differences_is_left_out_unless_it_is_asked_for() -> None:
    loads = build_loads(profile(), SHAPES[:1], SCALES, 8)
    assert set(ways_to_run(profile(), loads, None)) == {"guidance", "cfg", "everything"}
    with pytest.raises(ConfigError, match="the requests of sizes would not differ"):
        ways_to_run(profile(), loads, ["cfg", "sizes"])


def test_a_run_counts_what_was_in_its_forwards() -> None:
    pipeline = DummyPipeline(Durations(step_s=0.0))
    of = pipeline.profile("m", MAX_STEPS)
    guided = [sampling_params(of, Shape(64, 64, 3), 4.0, 0), sampling_params(of, Shape(64, 64, 1), 4.0, 1)]
    other = [sampling_params(of, Shape(32, 64, 2), 1.0, 2)]
    runs = GroupRuns(pipeline, threads=1)
    for stages in ([[guided, other]], [[guided], [other]]):
        run = runs.run(stages)
        assert run.seconds > 0
        assert run[1:] == (3 + 2, 4 + 2 + 2 + 2 * 1, 8 * 64 + 2 * 32, 8 * 64 + 2 * 32)


def test_a_run_with_a_request_that_fails_is_no_figure() -> None:
    class Failing(DummyPipeline):
        def denoise_step(self, input_batch: Any) -> Any:
            if input_batch.states[0].request_id.startswith("seed"):  # not the warm-up picture
                raise ValueError("no")
            return super().denoise_step(input_batch)

    pipeline = Failing(Durations(step_s=0.0))
    asked = sampling_params(pipeline.profile("m", MAX_STEPS), Shape(64, 64, 1))
    with pytest.raises(RequestError, match="the denoiser failed: ValueError: no"):
        GroupRuns(pipeline, threads=1).run([[[asked]]])
