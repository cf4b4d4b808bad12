"""What a request returns does not depend on who shares its batch: against the diffusers pipeline called alone."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from msgspec.structs import replace
from PIL import Image

from common.params import DiffusionRequest
from services.worker.input_batch import StepInputBatch
from services.worker.pipelines.protocol import StepPipeline
from tests.worker.driving import CROWD, EVERYBODY, LONG, Wrapped, draw_together, prepared, request
from tests.worker.solo import known_solo, worst_difference


def furthest(pipeline: StepPipeline, outcomes: dict[str, object], members: list[DiffusionRequest]) -> int:
    """The worst difference of any member from its solo picture."""
    pictures = [outcomes[member.request_id] for member in members]
    assert all(isinstance(picture, Image.Image) for picture in pictures), outcomes
    solos = [known_solo(pipeline, member.params) for member in members]
    return max(worst_difference(*pair) for pair in zip(pictures, solos, strict=True))  # type: ignore[arg-type]


async def test_a_picture_drawn_in_a_crowd_is_the_picture_drawn_alone(pipeline: StepPipeline) -> None:
    outcomes = await draw_together(pipeline, CROWD)
    assert furthest(pipeline, dict(outcomes), EVERYBODY) <= 1


async def test_sizes_that_a_plan_mixes_by_mistake_are_drawn_right(pipeline: StepPipeline) -> None:
    members = [request("small", seed=1, height=16, width=32), request("big", seed=2), request("tall", seed=3, width=16)]
    outcomes = await draw_together(pipeline, {0: members})
    assert furthest(pipeline, dict(outcomes), members) <= 1


async def test_the_demo_model_too(demo: StepPipeline) -> None:
    members = [
        request("a", prompt="green frog", seed=5, height=64, width=64, guidance_scale=4.0, max_sequence_length=20),
        request("b", prompt="flag of japan", seed=6, height=64, width=64, guidance_scale=1.0, max_sequence_length=20),
    ]
    outcomes = await draw_together(demo, {0: members[:1], 1: members[1:]})
    assert furthest(demo, dict(outcomes), members) <= 1


async def test_text_lengths_that_a_plan_mixes_by_mistake_are_drawn_right(tiny: Callable[[str], StepPipeline]) -> None:
    members = [
        request("default", seed=1),
        request("short", seed=2, prompt=LONG, max_sequence_length=12),
        request("long", seed=3, prompt=LONG, max_sequence_length=40),
    ]
    outcomes = await draw_together(tiny("sd3-t5"), {0: members})
    assert furthest(tiny("sd3-t5"), dict(outcomes), members) <= 1
    other_length = replace(members[1].params, max_sequence_length=40)
    assert worst_difference(*(known_solo(tiny("sd3-t5"), p) for p in (members[1].params, other_length))) > 1


def test_pndm_counts_the_steps_that_it_really_makes(tiny: Callable[[str], StepPipeline]) -> None:
    state = prepared(tiny("sd1"), request("r", num_inference_steps=6))
    assert state.total_steps == 7


class Mutated(Wrapped):
    """Swaps something of the first two requests in every batch."""

    def __init__(self, inner: StepPipeline, swap: Callable[[StepInputBatch], None]) -> None:
        super().__init__(inner)
        self._swap = swap

    def denoise_step(self, input_batch: StepInputBatch) -> Sequence[torch.Tensor]:
        batch = copy.copy(input_batch)  # its buffers are reused, the swap must not stay in them
        if batch.requests > 1:
            self._swap(batch)
        return self.inner.denoise_step(batch)


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    order = list(range(len(tensor)))
    order[:2] = [1, 0]
    return tensor[order]


def swap_guidance(batch: StepInputBatch) -> None:
    batch.guidance_scale = swapped(batch.guidance_scale)


def swap_embeddings(batch: StepInputBatch) -> None:
    batch.prompt_embeds = swapped(batch.prompt_embeds)


def swap_pooled_embeddings(batch: StepInputBatch) -> None:
    if batch.pooled_embeds is not None:
        batch.pooled_embeds = swapped(batch.pooled_embeds)


def swap_timesteps(batch: StepInputBatch) -> None:
    batch.timesteps = swapped(batch.timesteps)


PAIR = {0: [request("a", seed=1, guidance_scale=7.0)], 2: [request("b", seed=2, prompt=LONG, guidance_scale=2.0)]}
BOTH = [member for members in PAIR.values() for member in members]


@pytest.mark.parametrize("swap", [swap_guidance, swap_embeddings, swap_timesteps])
async def test_two_rows_swapped_in_a_batch_are_seen(pipeline: StepPipeline, swap: Callable[..., None]) -> None:
    outcomes = await draw_together(Mutated(pipeline, swap), PAIR)
    assert furthest(pipeline, dict(outcomes), BOTH) >= 8


@pytest.mark.parametrize("name", ["sd3", "sd3-t5"])
async def test_pooled_embeddings_swapped_in_a_batch_are_seen(tiny: Callable[[str], StepPipeline], name: str) -> None:
    outcomes = await draw_together(Mutated(tiny(name), swap_pooled_embeddings), PAIR)
    assert furthest(tiny(name), dict(outcomes), BOTH) >= 8


async def test_generators_swapped_between_requests_are_seen(tiny: Callable[[str], StepPipeline]) -> None:
    pipeline = tiny("sd1-ancestral")

    def swap_generators(batch: StepInputBatch) -> None:
        one, other = batch.states[0].extra_step_kwargs, batch.states[1].extra_step_kwargs
        one["generator"], other["generator"] = other["generator"], one["generator"]

    outcomes = await draw_together(Mutated(pipeline, swap_generators), PAIR)
    assert furthest(pipeline, dict(outcomes), BOTH) >= 8
