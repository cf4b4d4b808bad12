"""Seconds of work, from a worker's step cost.

Role: the arithmetic of `StepCost`. Pure functions of numbers.
"""

from common.messages import StepCost, WorkerHello
from common.params import SamplingParams
from services.scheduler.key import RequestShape


def rows_s(shape: RequestShape, cost: StepCost) -> float:
    """Seconds that one request's rows add to a step that already fills the device."""
    tokens = shape.row_tokens
    return shape.rows * (cost.per_token_s * tokens + cost.per_token2_s * tokens * tokens)


def step_share_s(params: SamplingParams, shape: RequestShape, hello: WorkerHello) -> float:
    """Seconds of a worker that one step of one request takes up, beside others.

    Its rows' own time; where those are too small to fill the device, its share of the floor of a full step. In request
    mode a step is a whole call, whose cost is that of the default number of denoise steps.
    """
    share_s = max(rows_s(shape, hello.cost), hello.cost.floor_s / max(hello.limits.max_num_seqs, 1))
    if hello.step_execution:
        return share_s
    return share_s * params.num_inference_steps / max(hello.profile.default_num_inference_steps, 1)


def steps_ahead(params: SamplingParams, hello: WorkerHello) -> int:
    """Steps that a request will have on a worker, before that has said so. A whole call counts as one."""
    return params.num_inference_steps if hello.step_execution else 1
