"""The first picture: drawn before anybody is served, or the worker ends with the reason."""

from collections.abc import Sequence

import pytest
import torch

from common.errors import ConfigError
from services.worker.pipelines.protocol import StepPipeline
from services.worker.preparation import Preparation
from services.worker.runner import StepRunner
from services.worker.state import DiffusionRequestState
from services.worker.warmup import Measured, estimate_cost, warm_up
from tests.worker.driving import Wrapped


def test_a_cost_comes_out_of_the_warm_up_and_nothing_stays(pipeline: StepPipeline) -> None:
    runner = StepRunner(pipeline)
    with torch.inference_mode():
        cost = warm_up(pipeline, Preparation(pipeline), runner, pipeline.profile("x", 200))
    assert cost.floor_s > 0
    assert cost.per_token_s > 0
    assert runner.get("warm-up") is None


def test_a_model_that_draws_no_numbers_stops_the_start(demo: StepPipeline) -> None:
    class Broken(Wrapped):
        def step_scheduler(
            self, states: Sequence[DiffusionRequestState], noise_preds: Sequence[torch.Tensor]
        ) -> list[torch.Tensor | Exception]:
            return [new * float("nan") for new in self.inner.step_scheduler(states, noise_preds)]  # type: ignore[operator]

    broken = Broken(demo)
    with torch.inference_mode(), pytest.raises(ConfigError, match="not numbers"):
        warm_up(broken, Preparation(broken), StepRunner(broken), demo.profile("x", 200))


def test_a_model_that_raises_stops_the_start(demo: StepPipeline) -> None:
    class Broken(Wrapped):
        def post_decode(self, state: DiffusionRequestState) -> None:  # type: ignore[override]
            raise RuntimeError("no kernel for this")

    broken = Broken(demo)
    with torch.inference_mode(), pytest.raises(ConfigError, match="no kernel for this"):
        warm_up(broken, Preparation(broken), StepRunner(broken), demo.profile("x", 200))


def test_the_slope_is_what_the_second_request_added() -> None:
    cost = estimate_cost(Measured(8, 0.010), Measured(128, 0.020), Measured(256, 0.0328))
    assert cost.floor_s == 0.010
    assert cost.per_token_s == pytest.approx(1e-4)


def test_a_second_request_that_cost_nothing_still_gives_a_slope() -> None:
    cost = estimate_cost(Measured(8, 0.010), Measured(128, 0.020), Measured(256, 0.020))
    assert cost.per_token_s == pytest.approx(0.020 / 256)
