"""Who runs in the next plan of one worker.

Role: policies, pure functions with names. A policy sees the worker's residents as they will stand when the plan starts
and returns the plan's groups. It must not know time, plans already sent, queues or other workers.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct

from common.messages import WorkerLimits
from services.scheduler.key import RequestShape


class Candidate(Struct, frozen=True):
    """A resident with steps to do, as it will stand when the plan starts."""

    request_id: str
    shape: RequestShape
    steps_left: int
    ready: bool  # prepared; only such may be in a group
    started: bool  # was in a step before


Groups = tuple[tuple[str, ...], ...]  # request ids; each inner tuple shares one forward pass
Policy = Callable[[Sequence[Candidate], WorkerLimits], Groups]


def fifo(candidates: Sequence[Candidate], limits: WorkerLimits) -> Groups:
    """First in, first out, one homogeneous group. `candidates` are in dispatch order.

    What runs goes on. Others join in order as long as they share the group's key and the limits allow; the first that
    can't, be it incompatible or still preparing, blocks those behind it.
    """
    group: list[str] = []
    key = None
    rows = tokens = 0
    for candidate in sorted(candidates, key=lambda c: not c.started):
        shape = candidate.shape
        if not candidate.ready or (group and not (shape.key == key and _fits(shape, len(group), rows, tokens, limits))):
            break
        group.append(candidate.request_id)
        key = shape.key
        rows += shape.rows
        tokens += shape.tokens
    return (tuple(group),) if group else ()


def _fits(shape: RequestShape, count: int, rows: int, tokens: int, limits: WorkerLimits) -> bool:
    """Whether one more fits beside `count` others. The first always does, or it would never run."""
    if limits.max_num_seqs and count >= limits.max_num_seqs:
        return False
    if limits.max_rows and rows + shape.rows > limits.max_rows:
        return False
    return not (limits.max_tokens and tokens + shape.tokens > limits.max_tokens)


POLICIES: dict[str, Policy] = {"fifo": fifo}
