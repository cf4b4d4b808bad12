"""The first picture: proof that this worker can draw, and a first guess at what a step costs.

Role: before a worker says hello it draws a picture of the default size through the same runner and decode that serve
requests, and times a few steps. A worker that can't ends with the reason.
"""

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from common.errors import ConfigError, RequestError
from common.messages import ModelProfile, StepCost
from common.params import DataHome, DiffusionRequest, SamplingParams
from services.worker.pipelines.protocol import StepPipeline
from services.worker.preparation import Preparation
from services.worker.runner import StepRunner
from services.worker.state import DiffusionRequestState
from services.worker.streams import synchronize

STEPS = 4  # of each measurement; the first one pays for one-off work and is not counted
NOWHERE = DataHome(gateway_id="", address="")


class Measured(NamedTuple):
    """One measurement."""

    tokens: int  # image tokens, summed over rows
    seconds: float  # of one step


def warm_up(pipeline: StepPipeline, preparation: Preparation, runner: StepRunner, profile: ModelProfile) -> StepCost:
    """Draws and measures. Raises `ConfigError` if the picture can't be drawn. Run it where torch may run."""
    big = _request(profile, profile.default_height, profile.default_width, profile.default_guidance_scale)
    side = profile.size.min_side
    # Unguided, so that it is a single row. To a compiled model one row and several are two kinds of batch.
    small = _request(profile, side, side, min(profile.default_guidance_scale, profile.cfg.threshold))
    try:
        states = [preparation.prepare_one(big)]
        one = _measure(pipeline, runner, states)
        pipeline.post_decode(states[0])
        two = _measure(pipeline, runner, [preparation.prepare_one(_renamed(big, name)) for name in ("a", "b")])
        least = _measure(pipeline, runner, [preparation.prepare_one(small)])
    except RequestError as error:
        raise ConfigError(f"the warm-up picture failed: {error.info.message} ({error.info.code})") from error
    except Exception as error:  # foreign code: any failure here means that nothing can be served
        raise ConfigError(f"the warm-up picture failed: {type(error).__name__}: {error}") from error
    return estimate_cost(least, one, two)


def estimate_cost(least: Measured, one: Measured, two: Measured) -> StepCost:
    """The step cost that fits three measurements: the least work there is, one request and two requests.

    The slope is what the second request added, or, where that is lost in the noise, the share of each token in a step
    of two. The floor is what the smallest step took.
    """
    slope = (two.seconds - one.seconds) / (two.tokens - one.tokens)
    if slope <= 0:
        slope = two.seconds / two.tokens
    return StepCost(floor_s=least.seconds, per_token_s=slope)


def _measure(pipeline: StepPipeline, runner: StepRunner, states: Sequence[DiffusionRequestState]) -> Measured:
    for state in states:
        runner.add(state)
    seconds = []
    tokens = 0
    while states[0].step_index < states[0].total_steps:
        begun = time.perf_counter()
        outcome = runner.run_group(states)
        synchronize(pipeline.device)
        seconds.append(time.perf_counter() - begun)
        tokens = outcome.tokens
        for _, error in outcome.failed + runner.settle():
            raise RequestError(error)
    for state in states:
        runner.remove(state.request_id)
    return Measured(tokens, statistics.median(seconds[1:] or seconds))


def _request(profile: ModelProfile, height: int, width: int, guidance_scale: float) -> DiffusionRequest:
    params = SamplingParams(
        prompt="a red apple on a table",
        height=height,
        width=width,
        num_inference_steps=min(STEPS, profile.max_num_inference_steps),
        guidance_scale=guidance_scale,
        true_cfg_scale=profile.default_true_cfg_scale,
        num_frames=profile.default_num_frames,
        seed=0,
    )
    return DiffusionRequest(request_id="warm-up", model=profile.model, params=params, home=NOWHERE)


def _renamed(request: DiffusionRequest, name: str) -> DiffusionRequest:
    return msgspec.structs.replace(request, request_id=f"{request.request_id}-{name}")
