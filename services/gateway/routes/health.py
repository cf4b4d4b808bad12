"""GET /health/live: the process answers. GET /health/ready: a call would be served."""

from http import HTTPStatus

from aiohttp import web

from services.gateway.responses import json_response
from services.gateway.state import STATE


async def live(request: web.Request) -> web.Response:
    return json_response({"status": "live"})


async def ready(request: web.Request) -> web.Response:
    state = request.app[STATE]
    models = state.models.ready()
    if not state.control.alive:
        reason = "the scheduler is not heard"
    elif not models:
        reason = "no model has a worker"
    else:
        return json_response({"status": "ready", "models": models})
    return json_response(
        {"status": "not_ready", "reason": reason, "models": models}, status=HTTPStatus.SERVICE_UNAVAILABLE
    )
