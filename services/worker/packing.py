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
    launches_overlap = pipeline.device.type != "cpu"
    return [part for alike in parts.values() for part in sized_alike(alike, cost, launches_overlap)]


def sized_alike(states: Sequence[DiffusionRequestState], cost: StepCost, launches_overlap: bool) -> list[Part]:
    """`states` in parts of similar size, so that all passes together take the least time, and of those the fewest.

    In a forward pass all rows are as long as the longest. A pass saved is `cost.floor_s` saved, padding is work: the
    work of its tokens comes on top of the floor, or hides it where a device works while it is given more to do.
    """
    alike: dict[int, Part] = {}  # by image tokens; those of one size need no padding and are never parted
    for state in states:
        alike.setdefault(state.image_tokens, []).append(state)
    sizes = sorted(alike, reverse=True)
    if len(sizes) == 1:
        return [list(states)]
    rows_before = [0, *accumulate(sum(state.rows for state in alike[size]) for size in sizes)]

    def seconds(start: int, end: int) -> float:
        longest = sizes[start]
        row_s = cost.per_token_s * longest + cost.per_token2_s * longest**2
        work_s = (rows_before[end] - rows_before[start]) * row_s
        return max(cost.floor_s, work_s) if launches_overlap else cost.floor_s + work_s

    # For the first so many sizes: the least time, the passes that takes, and where the last of them starts.
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)]
    for end in range(1, len(sizes) + 1):
        best.append(min((best[start][0] + seconds(start, end), best[start][1] + 1, start) for start in range(end)))
    parts: list[Part] = []
    end = len(sizes)
    while end:
        start = best[end][2]
        parts.append([state for size in sizes[start:end] for state in alike[size]])
        end = start
    return parts[::-1]
