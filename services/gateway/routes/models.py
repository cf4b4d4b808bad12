"""GET /v1/models and /v1/models/{id}: OpenAI's records, with what a client needs to ask rightly."""

import math
from typing import Any

import msgspec
from aiohttp import web

from common.messages import CfgRule, ModelStatus
from services.gateway.models import ModelTable, default_size
from services.gateway.responses import json_response
from services.gateway.state import STATE


async def list_models(request: web.Request) -> web.Response:
    models = request.app[STATE].models
    return json_response({"object": "list", "data": [_record(models, status) for status in models.served()]})


async def get_model(request: web.Request) -> web.Response:
    models = request.app[STATE].models
    return json_response(_record(models, models.find(request.match_info["model"])))


def _guidance(rule: CfgRule) -> dict[str, Any] | None:
    """When classifier-free guidance is on; None: the model has none."""
    return None if math.isinf(rule.threshold) else {field: getattr(rule, field) for field in rule.__struct_fields__}


def _record(models: ModelTable, status: ModelStatus) -> dict[str, Any]:
    profile = status.profile
    return {
        "id": profile.model,
        "object": "model",
        "created": models.first_seen(profile.model),
        "owned_by": "stepweave",
        "pipeline": profile.pipeline,
        "workers": status.workers,
        "default_size": default_size(profile),
        "size_rule": msgspec.to_builtins(profile.size),
        "default_num_inference_steps": profile.default_num_inference_steps,
        "max_num_inference_steps": profile.max_num_inference_steps,
        "default_guidance_scale": profile.default_guidance_scale,
        "default_true_cfg_scale": profile.default_true_cfg_scale,
        "default_num_frames": profile.default_num_frames,
        "max_num_frames": profile.max_num_frames,
        "default_max_sequence_length": profile.default_max_sequence_length,
        "max_sequence_length_limit": profile.max_sequence_length_limit,
        "cfg": _guidance(profile.cfg),
        "schedulers": list(profile.schedulers),
        "accepts": list(profile.accepts),
    }
