"""Builders for messages in tests: every field has a default, each test names what it is about."""

from typing import Any

import msgspec

from common import messages as m
from common.params import DataHome, DiffusionRequest, SamplingParams

GATEWAY = "gateway-test"
WORKER = "worker-test"
MODEL = "demo"
HOME = DataHome(gateway_id=GATEWAY, address="tcp://127.0.0.1:1")


def profile(**changes: Any) -> m.ModelProfile:
    values: dict[str, Any] = {
        "model": MODEL,
        "pipeline": "StableDiffusion3Pipeline",
        "size": m.SizeRule(multiple=8, min_side=16, max_side=192, max_pixels=192 * 192, pixels_per_token=8),
        "default_height": 64,
        "default_width": 64,
        "default_num_inference_steps": 20,
        "default_guidance_scale": 4.0,
        "max_num_inference_steps": 200,
    }
    return m.ModelProfile(**(values | changes))


def params(**changes: Any) -> SamplingParams:
    values: dict[str, Any] = {
        "prompt": "red apple",
        "height": 64,
        "width": 64,
        "num_inference_steps": 4,
        "guidance_scale": 4.0,
        "seed": 0,
    }
    return SamplingParams(**(values | changes))


def request(request_id: str = "r1", *, model: str = MODEL, home: DataHome = HOME, **changes: Any) -> DiffusionRequest:
    """A request; `changes` are of its sampling params."""
    return DiffusionRequest(request_id=request_id, model=model, params=params(**changes), home=home)


def submit(*requests: DiffusionRequest, gateway_id: str = GATEWAY) -> m.SubmitRequests:
    return m.SubmitRequests(gateway_id=gateway_id, requests=requests)


def gateway_hello(gateway_id: str = GATEWAY, **changes: Any) -> m.GatewayHello:
    hello = m.GatewayHello(gateway_id=gateway_id, protocol_version=m.PROTOCOL_VERSION)
    return msgspec.structs.replace(hello, **changes)


def worker_hello(
    worker_id: str = WORKER,
    *,
    max_num_seqs: int = 4,
    max_residents: int = 8,
    **changes: Any,
) -> m.WorkerHello:
    hello = m.WorkerHello(
        worker_id=worker_id,
        protocol_version=m.PROTOCOL_VERSION,
        scheduler_boot_id="",
        profile=profile(),
        cost=m.StepCost(floor_s=0.02, per_token_s=1e-4),
        limits=m.WorkerLimits(max_num_seqs=max_num_seqs, max_residents=max_residents),
    )
    return msgspec.structs.replace(hello, **changes)
