"""Who shares a forward pass: what can, as long as that is faster than to go apart."""

import pytest
import torch

from common.messages import StepCost
from services.worker.packing import forwards, sized_alike
from services.worker.state import DiffusionRequestState
from tests.worker.driving import Wrapped, prepared, request
from tests.worker.masked import MaskedPipeline


class Mixing(Wrapped):
    """A pipeline that mixes sizes."""

    def __init__(self) -> None:
        super().__init__(MaskedPipeline())
        self.mixes = ("steps", "resolution")


def sized(request_id: str, tokens: int, scale: float = 1.0) -> DiffusionRequestState:
    state = prepared(MaskedPipeline(), request(request_id, guidance_scale=scale))
    state.latents = torch.zeros(1, tokens, 4)
    state.image_tokens = tokens
    return state


def names(parts: list[list[DiffusionRequestState]]) -> list[str]:
    return ["".join(member.request_id for member in part) for part in parts]


FILLED = StepCost(floor_s=0.0, per_token_s=1e-3)  # every token takes its time
IDLE = StepCost(floor_s=1.0, per_token_s=1e-3)  # up to 1,000 tokens a pass takes as long as a pass of one


@pytest.mark.parametrize("launches_overlap", [False, True])
@pytest.mark.parametrize(
    ("cost", "together"),
    [
        (FILLED, ["bf", "c", "e", "ad"]),  # only those that need no padding
        (IDLE, ["bfcead"]),
        (StepCost(floor_s=0.1, per_token_s=1e-3), ["bfc", "ead"]),  # the small ones wait for each other, not for 64
    ],
)
def test_sizes_go_together_where_that_is_faster(cost: StepCost, together: list[str], launches_overlap: bool) -> None:
    sizes = {"a": 4, "b": 64, "c": 48, "d": 4, "e": 6, "f": 64}
    members = [sized(name, tokens) for name, tokens in sizes.items()]
    assert names(sized_alike(members, cost, launches_overlap)) == together


def test_a_pass_more_costs_nothing_where_the_work_of_the_others_hides_it() -> None:
    members = [sized(name, tokens) for name, tokens in {"a": 64, "b": 64, "c": 48, "d": 48}.items()]
    cost = StepCost(floor_s=0.04, per_token_s=1e-3)
    assert names(sized_alike(members, cost, launches_overlap=True)) == ["ab", "cd"]
    assert names(sized_alike(members, cost, launches_overlap=False)) == ["abcd"]


@pytest.mark.parametrize("launches_overlap", [False, True])
def test_no_part_is_slower_than_its_members_apart(launches_overlap: bool) -> None:
    cost = StepCost(floor_s=0.02, per_token_s=1e-3)
    members = [sized(str(n), n, scale=1.0 + n % 2) for n in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89)]

    def seconds(part: list[DiffusionRequestState]) -> float:
        work = 1e-3 * sum(member.rows for member in part) * max(member.image_tokens for member in part)
        return max(0.02, work) if launches_overlap else 0.02 + work

    parts = sized_alike(members, cost, launches_overlap)
    assert 1 < len(parts) < len(members)
    for part in parts:
        assert seconds(part) <= sum(seconds([member]) for member in part) + 1e-12
    assert sorted(member.image_tokens for part in parts for member in part) == [1, 2, 3, 5, 8, 13, 21, 34, 55, 89]


def test_until_a_step_has_been_measured_all_that_can_go_together_does() -> None:
    members = [sized("a", 4), sized("b", 64)]
    assert names(forwards(members, Mixing(), None)) == ["ab"]
    assert names(forwards(members, Mixing(), FILLED)) == ["b", "a"]


def test_sizes_and_texts_that_a_pipeline_can_not_mix_never_go_together() -> None:
    members = [sized("a", 4), sized("b", 64), sized("c", 4)]
    assert names(forwards(members, MaskedPipeline(), None)) == ["ac", "b"]
    unmasked = Mixing()
    unmasked.heeds_prompt_mask = False
    members[2].cond = prepared(MaskedPipeline(), request("x", prompt="short")).cond
    assert names(forwards(members, unmasked, None)) == ["ab", "c"]
