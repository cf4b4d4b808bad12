"""Request mode's first pictures: proof that a pipeline can be served by its whole call, and whether in batches.

Role: before a worker says hello it draws by the very calls that serve requests. A pipeline that can't draw from a
prompt and a seed alone, or draws another picture each time, ends the worker with the reason. Whether a picture stays
the same in a batch is tried with two requests of other seeds and text lengths: pipelines that pad prompts to the
longest, or share a generator, change it, and are then called for one request at a time.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import structlog
import torch

from common.errors import ConfigError
from common.messages import ModelProfile, StepCost
from common.params import DiffusionRequest, SamplingParams
from common.rows import row_tokens, uses_cfg
from services.worker.pipelines.whole_call import WholeCallPipeline, to_image
from services.worker.request_batch import DiffusionRequestBatch, Drawn, RequestState
from services.worker.streams import release_cached_memory
from services.worker.warmup import NOWHERE, Measured, estimate_cost

log = structlog.get_logger()

STEPS = 2  # of each call here; some distilled pipelines can't draw in more
PROMPTS = ("apple", "an oil painting of a yellow school bus and a cat with sunglasses beside an old house by a lake")
NEGATIVE_PROMPTS = ("low quality, blurry, dark, cropped", "ugly")
WORST_DIFFERENCE = 1 / 255  # of any value, in float32
MEAN_DIFFERENCE = 2 / 255  # in half precision, where single values may well differ more


class Proven(NamedTuple):
    """What the first pictures have shown."""

    profile: ModelProfile
    cost: StepCost  # of the only step that requests have here, the call with the default number of denoise steps
    together: bool  # whether requests may share a call


def prove(pipeline: WholeCallPipeline, model: str, max_num_inference_steps: int, max_num_seqs: int) -> Proven:
    """Draws and measures. Raises `ConfigError` if the pipeline can't be served. Run it where torch may run."""
    steps = min(STEPS, pipeline.default_steps, max_num_inference_steps)
    with _refusing(pipeline):
        first = pipeline.draw(_batch(_state(pipeline, 0, steps, 0, 0)), sizes=False)[0].picture
        height, width = first.shape[:2]
        _require_repeatable(pipeline, first, _state(pipeline, 0, steps, height, width))
        states = [_state(pipeline, index, steps, height, width, negative=True) for index in (0, 1)]
        begun = time.perf_counter()
        alone = [pipeline.draw(_batch(state))[0] for state in states]
        seconds = (time.perf_counter() - begun) / len(states)

    profile = pipeline.profile(
        model, max_num_inference_steps, height, width, other_sizes=_draws_other_sizes(pipeline, steps, height, width)
    )
    whole = profile.default_num_inference_steps / steps
    params = states[0].request.params
    tokens = row_tokens(height, width, 1, profile.size) * (2 if uses_cfg(params, profile) else 1)
    one, two = Measured(tokens, seconds * whole), Measured(2 * tokens, 2 * seconds * whole)
    together = False
    if max_num_seqs > 1:
        begun = time.perf_counter()
        fault = _batch_fault(pipeline, states, alone)
        two = Measured(2 * tokens, (time.perf_counter() - begun) * whole) if fault is None else two
        if fault is None and pipeline.guided_params:
            fault = _guided_fault(pipeline, steps, height, width)
        together = fault is None
        if fault is not None:
            log.warning("requests are drawn one at a time", pipeline=pipeline.name, reason=fault)
    return Proven(profile, estimate_cost(one, one, two), together)


def _draws_other_sizes(pipeline: WholeCallPipeline, steps: int, height: int, width: int) -> bool:
    """Whether it draws a size other than its own as it is told. Some go to the nearest of a few that they know."""
    if not pipeline.takes_size:
        return False
    side = pipeline.smallest_side(height, width)
    asked = (side, side + pipeline.grid)
    try:
        drawn = pipeline.draw(_batch(_state(pipeline, 0, steps, *asked)))[0].picture.shape[:2]
    except torch.AcceleratorError:
        raise
    except Exception as error:  # foreign code: whatever it raises, its own size has just worked
        reason = _first_line(error)
    else:
        if drawn == asked:
            return True
        reason = f"it drew {drawn[1]}x{drawn[0]}"
    log.warning("one size is served", pipeline=pipeline.name, asked=f"{asked[1]}x{asked[0]}", reason=reason)
    return False


def _require_repeatable(pipeline: WholeCallPipeline, first: np.ndarray, state: RequestState) -> None:
    """Raises `ConfigError` if the same call does not give the same picture, or not the one that diffusers gives as
    output_type="pil"."""
    if not np.isfinite(first).all():
        raise ConfigError(f"the warm-up picture of this {pipeline.name} holds values that are not numbers")
    rounded = np.asarray(to_image(first), dtype=np.float32).reshape(first.shape) / 255
    if _difference(pipeline, rounded, pipeline.draw(_batch(state), output_type="pil")[0].picture) is None:
        return
    if _difference(pipeline, first, pipeline.draw(_batch(state))[0].picture) is not None:
        reason = "the same seed gives another picture each time"
    else:
        reason = "its pictures are other ones as output_type 'np' than as 'pil'"
    raise ConfigError(f"this {pipeline.name} can't be served by its whole call: {reason}")


def _batch_fault(pipeline: WholeCallPipeline, states: list[RequestState], alone: list[Drawn]) -> str | None:
    """Why requests can't share a call, or None."""
    if any(drawn.flagged for drawn in alone):
        return "its safety checker refused a warm-up picture, so none could be compared"
    if _difference(pipeline, alone[0].picture, alone[1].picture) is None:
        return "two requests that differ in all gave one picture, so a difference could not be seen"
    try:
        drawn = pipeline.draw(_batch(*states))
    except torch.AcceleratorError:
        raise
    except Exception as error:  # foreign code: whatever it raises, one request at a time has just worked
        reason = f"a call for two failed: {_first_line(error)}"
    else:
        differences = [_difference(pipeline, a.picture, b.picture) for a, b in zip(alone, drawn, strict=True)]
        found = next((difference for difference in differences if difference is not None), None)
        return None if found is None else f"a picture differs {found} between a call for two and a call for one"
    release_cached_memory(pipeline.device)  # in case that this was what it lacked
    return reason


def _guided_fault(pipeline: WholeCallPipeline, steps: int, height: int, width: int) -> str | None:
    """As `_batch_fault`, with guidance, of what has it off by default: negative prompts count only then."""
    states = [_state(pipeline, i, steps, height, width, negative=True, **pipeline.guided_params) for i in (0, 1)]
    try:
        alone = [pipeline.draw(_batch(state))[0] for state in states]
    except torch.AcceleratorError:
        raise
    except Exception as error:  # foreign code: whatever it raises, without guidance it has just worked
        return f"a call with guidance failed: {_first_line(error)}"
    return _batch_fault(pipeline, states, alone)


def _difference(pipeline: WholeCallPipeline, one: np.ndarray, other: np.ndarray) -> str | None:
    """In words how two pictures differ, or None if it is no more than rounding."""
    if one.shape != other.shape:
        return f"in shape ({one.shape}, {other.shape})"
    differences = np.abs(one - other)
    worst, mean = float(differences.max()), float(differences.mean())
    # Written so that NaN counts as a difference; the small number is for the rounding of 1/255 itself.
    alike = worst <= WORST_DIFFERENCE + 1e-6 if pipeline.exact else mean <= MEAN_DIFFERENCE
    return None if alike else f"by up to {255 * worst:.1f}/255 (on average {255 * mean:.2f}/255)"


@contextlib.contextmanager
def _refusing(pipeline: WholeCallPipeline) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # foreign code: any failure here means that nothing can be served
        inputs = pipeline.unfilled_inputs
        why = f"it needs an input {inputs[0].replace('_image', '')}: without one its call" if inputs else "its call"
        raise ConfigError(
            f"this {pipeline.name} can't be served by its whole call: {why} failed with {_first_line(error)}"
        ) from error


def _state(
    pipeline: WholeCallPipeline,
    index: int,
    steps: int,
    height: int,
    width: int,
    negative: bool = False,
    **params: float,
) -> RequestState:
    values: dict[str, Any] = {
        "prompt": PROMPTS[index],
        "negative_prompt": NEGATIVE_PROMPTS[index] if negative and pipeline.takes_negative_prompt else None,
        "height": height,
        "width": width,
        "num_inference_steps": steps,
        "guidance_scale": pipeline.default_guidance_scale,
        "seed": index + 1,
    }
    request = DiffusionRequest(f"warm-up-{index}", "", SamplingParams(**values | params), NOWHERE)
    return pipeline.prepare_encode(request)


def _batch(*states: RequestState) -> DiffusionRequestBatch:
    return DiffusionRequestBatch(states)


def _first_line(error: Exception) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text[:300]}"
