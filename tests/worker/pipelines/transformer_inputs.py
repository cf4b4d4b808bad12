"""What a step pipeline's transformer is given, seen and spoilt from outside, for the families of FLUX."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from PIL import Image

from common.params import DiffusionRequest
from services.worker.pipelines.protocol import StepPipeline
from tests.worker.solo import diffusers_pipeline, draw_solo, worst_difference

Inputs = dict[str, Any]


@contextlib.contextmanager
def inputs_seen(pipeline: StepPipeline, see: Callable[[Inputs], Inputs | None]) -> Iterator[None]:
    """Shows each forward's inputs to `see`, and gives the transformer what it returns, if anything."""

    def before(module: Any, arguments: tuple[Any, ...], inputs: Inputs) -> Any:
        changed = see(inputs)
        return None if changed is None else (arguments, changed)

    hook = diffusers_pipeline(pipeline).transformer.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def rows_counted(pipeline: StepPipeline) -> Iterator[list[int]]:
    """How many rows each forward has."""
    rows: list[int] = []
    with inputs_seen(pipeline, lambda inputs: rows.append(len(inputs["hidden_states"]))):
        yield rows


def furthest(pipeline: StepPipeline, outcomes: dict[str, Any], members: Sequence[DiffusionRequest]) -> int:
    """The worst difference of any member from its solo picture."""
    assert all(isinstance(picture, Image.Image) for picture in outcomes.values()), outcomes
    return max(worst_difference(outcomes[member.request_id], draw_solo(pipeline, member.params)) for member in members)
