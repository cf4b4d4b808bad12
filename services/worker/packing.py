"""Which requests of a group share a forward pass.

Role: a pure function of states, of what the pipeline mixes and of what a step was measured to cost. It corrects what a
plan errs in, whatever the plan says: a wrong plan may cost time, never a picture.
"""

from collections.abc import Sequence
from itertools import accumulate

from common.messages import StepCost
from services.worker.pipelines.protocol import StepPipeline
from services.worker.state import DiffusionRequestState

Part = list[DiffusionRequestState]


def forwards(states: Sequence[DiffusionRequestState], pipeline: StepPipeline, cost: StepCost | None) -> list[Part]:
    """`states` in parts, each of which is one forward pass. Without a `cost` all that can share one does."""
    mixes_sizes = "resolution" in pipeline.mixes
    parts: dict[tuple[object, ...], Part] = {}
    for state in states:
        tokens = 0 if pipeline.heeds_prompt_mask else state.cond.prompt_embeds.shape[1]
        size = state.latents.ndim if mixes_sizes else state.latents.shape
        parts.setdefault((size, state.latents.dtype, tokens), []).append(state)
    if cost is None:
        return list(parts.values())
    return [part for alike in parts.values() for part in sized_alike(alike, cost)]


def sized_alike(states: Sequence[DiffusionRequestState], cost: StepCost) -> list[Part]:
    """`states` in parts of similar size, so that all passes together take the least time, and of those the fewest.

    In a forward pass all rows are as long as the longest. Where few rows leave the device idle, padding is free and a
    pass saved is time saved; where they fill it, padding is work.
    """
    ordered = sorted(states, key=lambda state: -state.image_tokens)  # stable: equal sizes keep their order
    if ordered[0].image_tokens == ordered[-1].image_tokens:
        return [ordered]
    rows_before = [0, *accumulate(state.rows for state in ordered)]

    def seconds(start: int, end: int) -> float:
        tokens = ordered[start].image_tokens
        row_s = cost.per_token_s * tokens + cost.per_token2_s * tokens**2
        return max(cost.floor_s, (rows_before[end] - rows_before[start]) * row_s)

    # For the first so many: the least time, the passes that takes, and where the last of them starts.
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)]
    for end in range(1, len(ordered) + 1):
        best.append(min((best[start][0] + seconds(start, end), best[start][1] + 1, start) for start in range(end)))
    parts: list[Part] = []
    end = len(ordered)
    while end:
        start = best[end][2]
        parts.append(ordered[start:end])
        end = start
    return parts[::-1]
