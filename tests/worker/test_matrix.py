"""Every family in every kind of company: each picture is the one that diffusers draws alone.

All of it with `--all` (`make test-all`); else a part that was drawn once from a seed, in which every family and every
situation occurs.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from PIL import Image

from common.params import DiffusionRequest
from common.rows import uses_cfg
from services.worker.input_batch import StepInputBatch
from services.worker.pipelines.protocol import StepPipeline, Video
from tests.checkpoints import CHECKPOINTS
from tests.worker.driving import LONG, Wrapped, draw_together, request
from tests.worker.solo import in_its_terms, known_solo_frames, worst_difference

NEGATIVE = "blurry, ugly, watermark"
SUBSET_SEED = 5
SITUATIONS_OF_A_FAMILY = 2  # in the part that `make test` runs


class Company(NamedTuple):
    """Who is drawn together, and from when on."""

    joins: dict[int, list[DiffusionRequest]]  # by tick
    together: int  # requests that must have been in one forward
    aborts: dict[int, list[str]] = {}  # noqa: RUF012 - never changed

    @property
    def members(self) -> list[DiffusionRequest]:
        gone = {name for names in self.aborts.values() for name in names}
        everybody = [member for members in self.joins.values() for member in members]
        return [member for member in everybody if member.request_id not in gone]


def guided(pipeline: StepPipeline, scale: float) -> dict[str, Any]:
    """What a request must say to have classifier-free guidance."""
    rule = pipeline.profile("m", 50).cfg
    return {rule.scale_field: scale, "negative_prompt": NEGATIVE}


def unguided(pipeline: StepPipeline) -> dict[str, Any]:
    """What a request must say to have none."""
    rule = pipeline.profile("m", 50).cfg
    return {rule.scale_field: rule.threshold}


def alone(pipeline: StepPipeline) -> Company:
    return Company({0: [request("only", prompt=LONG, seed=21, num_inference_steps=7)]}, together=1)


def four(pipeline: StepPipeline) -> list[DiffusionRequest]:
    """Different prompt lengths, seeds, steps and guidance."""
    return [
        request("a", prompt="frog", seed=31, num_inference_steps=6, guidance_scale=2.5),
        request("b", prompt=LONG, seed=32, num_inference_steps=8, guidance_scale=7.0),
        request("c", prompt="a green frog under a purple umbrella", seed=33, num_inference_steps=5),
        request("d", prompt="", seed=34, num_inference_steps=7, guidance_scale=4.0),
    ]


def batch_of_four(pipeline: StepPipeline) -> Company:
    return Company({0: four(pipeline)}, together=4)


def joining_late(pipeline: StepPipeline) -> Company:
    a, b, c, d = four(pipeline)
    return Company({0: [a], 2: [b, c], 4: [d]}, together=4)


def one_aborted(pipeline: StepPipeline) -> Company:
    a, b, c, d = four(pipeline)
    return Company({0: [a, b], 1: [c, d]}, together=4, aborts={3: ["b"]})


def guidance_on_beside_off(pipeline: StepPipeline) -> Company:
    scales = {"a": guided(pipeline, 3.0), "b": unguided(pipeline), "c": guided(pipeline, 6.0), "d": unguided(pipeline)}
    members = [request(name, prompt=f"frog {name}", seed=41, **changes) for name, changes in scales.items()]
    profile = pipeline.profile("m", 50)
    assert [uses_cfg(member.params, profile) for member in members] == [True, False, True, False]
    return Company({0: members[:3], 1: members[3:]}, together=4)


def mixed_sizes(pipeline: StepPipeline) -> Company:
    sizes = {"a": (32, 32), "b": (48, 32), "c": (32, 48), "d": (16, 32)}
    members = [
        request(name, seed=51, height=height, width=width, prompt=f"{name} {LONG}" if name == "b" else "frog")
        for name, (height, width) in sizes.items()
    ]
    return Company({0: members[:2], 1: members[2:]}, together=3 if "resolution" in pipeline.mixes else 1)


def all_alike(pipeline: StepPipeline) -> Company:
    return Company({0: [request(name, seed=61) for name in "abcd"]}, together=4)


def alike_but_for_the_length_of_the_prompt(pipeline: StepPipeline) -> Company:
    prompts = {"a": "frog", "b": "a green frog", "c": LONG, "d": "a green frog under a purple umbrella"}
    return Company({0: [request(name, prompt=prompt, seed=62) for name, prompt in prompts.items()]}, together=4)


def the_pictures_of_one_call(pipeline: StepPipeline) -> Company:
    """n=4, seed=71: picture i is that of n=1, seed=71+i."""
    return Company({0: [request(str(index), seed=71 + index) for index in range(4)]}, together=4)


SITUATIONS: dict[str, Callable[[StepPipeline], Company]] = {
    build.__name__: build
    for build in (
        alone,
        batch_of_four,
        joining_late,
        one_aborted,
        guidance_on_beside_off,
        mixed_sizes,
        all_alike,
        alike_but_for_the_length_of_the_prompt,
        the_pictures_of_one_call,
    )
}


def cases(everything: bool) -> list[tuple[str, str]]:
    """Pairs of a family and a situation."""
    if everything:
        return [(family, situation) for family in CHECKPOINTS for situation in SITUATIONS]
    order = list(SITUATIONS)
    random.Random(SUBSET_SEED).shuffle(order)
    rounds = [order[index % len(order)] for index in range(SITUATIONS_OF_A_FAMILY * len(CHECKPOINTS))]
    return [(family, rounds.pop(0)) for _ in range(SITUATIONS_OF_A_FAMILY) for family in CHECKPOINTS]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "situation" in metafunc.fixturenames:
        metafunc.parametrize(("family", "situation"), cases(metafunc.config.getoption("all")))


class Watched(Wrapped):
    """Remembers how many requests each forward had."""

    def __init__(self, inner: StepPipeline) -> None:
        super().__init__(inner)
        self.forwards: list[int] = []

    def denoise_step(self, input_batch: StepInputBatch) -> Any:
        self.forwards.append(input_batch.requests)
        return self.inner.denoise_step(input_batch)


def frames_of(outcome: object) -> list[Image.Image]:
    assert isinstance(outcome, Image.Image | Video), outcome
    return [outcome] if isinstance(outcome, Image.Image) else [Image.fromarray(frame) for frame in outcome.frames]


async def test_every_picture_is_that_of_diffusers_alone(
    tiny: Callable[[str], StepPipeline], family: str, situation: str
) -> None:
    pipeline = tiny(family)
    company = SITUATIONS[situation](pipeline)
    watched = Watched(pipeline)
    outcomes = await draw_together(watched, company.joins, company.aborts)
    assert max(watched.forwards) >= company.together
    assert outcomes.keys() == {member.request_id for member in company.members}
    for member in company.members:
        expected = known_solo_frames(pipeline, in_its_terms(pipeline, member.params))
        drawn = frames_of(outcomes[member.request_id])
        assert len(drawn) == len(expected)
        for one, other in zip(drawn, expected, strict=True):
            assert one.size == other.size
            assert worst_difference(one, other) <= 1, member.request_id


def test_the_part_that_is_always_run_has_every_family_and_every_situation() -> None:
    always = cases(everything=False)
    assert {family for family, _ in always} == set(CHECKPOINTS)
    assert {situation for _, situation in always} == set(SITUATIONS)
    assert len(set(always)) == len(always)
