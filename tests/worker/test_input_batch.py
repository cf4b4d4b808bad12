"""Rows: padding and masks, guided and unguided requests, buffers that stay."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from services.worker.input_batch import StepInputBatch, guide, scatter_latents
from services.worker.state import Conditioning, DiffusionRequestState
from tests.worker.driving import Wrapped, draw_together, prepared, request
from tests.worker.masked import MaskedPipeline
from tests.worker.solo import worst_difference


def state(request_id: str, **changes: Any) -> DiffusionRequestState:
    return prepared(MaskedPipeline(), request(request_id, **changes))


def test_prompts_are_padded_on_the_right_to_the_longest_with_a_mask() -> None:
    batch = StepInputBatch(
        [state("a", prompt="ab", guidance_scale=1.0), state("b", prompt="abcde", guidance_scale=1.0)]
    )
    assert batch.prompt_embeds.shape == (2, 5, 4)
    assert batch.prompt_mask.tolist() == [[True, True, False, False, False], [True] * 5]
    assert torch.equal(batch.prompt_embeds[0, 2:], torch.zeros(3, 4))
    assert torch.equal(batch.prompt_embeds[0, :2], state("a", prompt="ab").cond.prompt_embeds[0])


def test_a_rows_own_mask_is_kept() -> None:
    masked = state("a", guidance_scale=1.0)
    masked.cond = Conditioning(torch.ones(1, 3, 4), torch.tensor([[True, False, True]]))
    assert StepInputBatch([masked]).prompt_mask.tolist() == [[True, False, True]]


def test_guided_requests_have_two_rows_and_others_one() -> None:
    members = [state("a", guidance_scale=5.0), state("b", guidance_scale=1.0), state("c", guidance_scale=3.0)]
    members[0].step_index, members[2].step_index = 2, 4
    batch = StepInputBatch(members)
    batch.gather()
    assert (batch.requests, batch.rows) == (3, 5)
    places = [0, 1, 2, 0, 2]
    assert torch.equal(batch.latents, torch.cat([members[place].latents for place in places]))
    expected = [members[place].timesteps[members[place].step_index] for place in places]
    assert torch.equal(batch.timesteps, torch.stack(expected))
    assert torch.equal(batch.prompt_embeds[3, :1], members[0].uncond.prompt_embeds[0])  # type: ignore[union-attr]


def test_guidance_is_each_requests_own_and_leaves_unguided_ones_alone() -> None:
    members = [state("a", guidance_scale=5.0), state("b", guidance_scale=1.0), state("c", guidance_scale=3.0)]
    batch = StepInputBatch(members)
    rows = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 4, 2, 2)  # conditioned 0 1 2, unconditioned 3 4
    assert guide(batch, rows)[:, 0, 0, 0].tolist() == [3 + 5 * (0 - 3), 1, 4 + 3 * (2 - 4)]


def test_guidance_rounds_as_a_plain_number_would_in_half_precision() -> None:
    batch = StepInputBatch([state("a", guidance_scale=7.3)])
    rows = torch.randn(2, 4, 2, 2, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    cond, uncond = rows[:1], rows[1:]
    assert torch.equal(guide(batch, rows), uncond + 7.3 * (cond - uncond))


def test_buffers_stay_while_the_composition_stays() -> None:
    members = [state("a"), state("b")]
    batch = StepInputBatch(members)
    batch.gather()
    storage = (batch.latents.data_ptr(), batch.timesteps.data_ptr(), batch.prompt_embeds.data_ptr())
    scatter_latents(members, [torch.ones_like(member.latents) for member in members])
    batch.gather()
    assert (batch.latents.data_ptr(), batch.timesteps.data_ptr(), batch.prompt_embeds.data_ptr()) == storage
    assert bool((batch.latents == 1).all())
    assert batch.is_of(members)
    assert not batch.is_of(members[::-1])
    assert not batch.is_of(members[:1])


def test_another_attempt_is_another_composition() -> None:
    first = state("a")
    again = copy.copy(first)
    assert not StepInputBatch([first]).is_of([again])


def test_scatter_moves_each_request_one_step() -> None:
    members = [state("a"), state("b")]
    members[1].step_index = 3
    new = [torch.zeros_like(member.latents) for member in members]
    scatter_latents(members, new)
    assert [member.step_index for member in members] == [1, 4]
    assert members[0].latents is new[0]
    assert members[1].latents is new[1]


def sized(request_id: str, *shape: int, scale: float = 1.0) -> DiffusionRequestState:
    """A request whose latents, (1, *shape), hold numbers of its own."""
    found = state(request_id, guidance_scale=scale)
    found.latents = torch.randn(1, *shape, generator=torch.Generator().manual_seed(len(request_id)))
    found.image_tokens = shape[0]
    return found


def test_sequences_of_image_tokens_are_padded_on_the_right_with_a_mask() -> None:
    members = [sized("a", 2, 3, scale=5.0), sized("bb", 4, 3), sized("ccc", 3, 3, scale=2.0)]
    batch = StepInputBatch(members)
    batch.gather()
    assert isinstance(batch.latents, torch.Tensor)
    assert batch.image_mask is not None
    assert batch.image_lengths == (2, 4, 3, 2, 3)
    assert [sum(row) for row in batch.image_mask.tolist()] == [2, 4, 3, 2, 3]
    for row, owner in zip(batch.latents, batch.row_states, strict=True):
        length = owner.latents.shape[1]
        assert torch.equal(row[:length], owner.latents[0])
        assert not row[length:].any()
    for part, member in zip(batch.split(batch.latents[:3]), members, strict=True):
        assert torch.equal(part, member.latents)


def test_sequences_of_one_length_are_not_masked() -> None:
    batch = StepInputBatch([sized("a", 2, 3), sized("bb", 2, 3)])
    batch.gather()
    assert batch.image_mask is None
    assert [part.shape for part in batch.split(torch.zeros(2, 2, 3))] == [(1, 2, 3), (1, 2, 3)]


def test_pictures_of_different_sizes_come_as_a_list() -> None:
    members = [sized("a", 4, 2, 2, scale=5.0), sized("bb", 4, 2, 3)]
    batch = StepInputBatch(members)
    batch.gather()
    assert isinstance(batch.latents, list)
    for row, owner in zip(batch.latents, batch.row_states, strict=True):
        assert torch.equal(row, owner.latents[0])


def test_what_depends_on_the_composition_alone_is_made_once() -> None:
    batch = StepInputBatch([state("a")])
    made: list[int] = []

    def make() -> int:
        made.append(1)
        return len(made)

    assert [batch.once("ids", make), batch.once("ids", make), batch.once("masks", make)] == [1, 1, 2]


MEMBERS = [request("a", prompt="k", seed=1), request("b", prompt="a long prompt of many letters", seed=2)]


async def alone(pipeline: MaskedPipeline) -> list[Any]:
    return [(await draw_together(pipeline, {0: [member]}))[member.request_id] for member in MEMBERS]


async def test_a_prompt_padded_beside_a_longer_one_draws_the_same_picture() -> None:
    together = await draw_together(MaskedPipeline(), {0: MEMBERS})
    for picture, member in zip(await alone(MaskedPipeline()), MEMBERS, strict=True):
        assert worst_difference(together[member.request_id], picture) <= 1  # type: ignore[arg-type]


async def test_masks_swapped_in_a_batch_are_seen() -> None:
    class Swapped(Wrapped):
        def denoise_step(self, input_batch: StepInputBatch) -> Sequence[torch.Tensor]:
            batch = copy.copy(input_batch)
            batch.prompt_mask = batch.prompt_mask[[1, 0, 2, 3]]
            return self.inner.denoise_step(batch)

    together = await draw_together(Swapped(MaskedPipeline()), {0: MEMBERS})
    pairs = zip(await alone(MaskedPipeline()), MEMBERS, strict=True)
    assert max(worst_difference(together[member.request_id], picture) for picture, member in pairs) >= 8  # type: ignore[arg-type]


@pytest.mark.parametrize("pooled", [(True, False), (False, True)])
def test_rows_with_and_without_pooled_embeddings_do_not_mix(pooled: tuple[bool, bool]) -> None:
    members = [state("a", guidance_scale=1.0), state("b", guidance_scale=1.0)]
    for member, has in zip(members, pooled, strict=True):
        member.cond = Conditioning(torch.ones(1, 3, 4), pooled_embeds=torch.ones(1, 2) if has else None)
    with pytest.raises(ValueError, match="pooled"):
        StepInputBatch(members)
