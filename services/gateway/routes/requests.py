"""GET /v1/requests/{id}: how far a call of this gateway is, also for a while after its end.

The id is the call's x-request-id, or the X-Client-Request-Id that its client gave, which can be asked for before there
is a reply.
"""

from http import HTTPStatus

from aiohttp import web

from services.gateway.errors import ApiError
from services.gateway.responses import json_response, progress
from services.gateway.state import STATE


async def get_request(request: web.Request) -> web.Response:
    name = request.match_info["id"]
    call = request.app[STATE].calls.find(name)
    if call is None:
        raise ApiError(
            f"no call {name[:128]!r} is known here; ended ones are forgotten after a minute",
            status=HTTPStatus.NOT_FOUND,
            param="id",
            code="request_not_found",
        )
    return json_response(progress(call))
