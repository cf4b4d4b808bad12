"""What holds for every reply: an x-request-id, OpenAI's error shape, one log line.

Role: the outermost layer of HTTP. Whatever a handler raises ends here and becomes a reply; no traceback leaves.
"""

import asyncio
import logging
import secrets
import time
from http import HTTPStatus

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from services.gateway.errors import ApiError
from services.gateway.responses import error_response
from services.gateway.state import CALL_ID, LOG_FIELDS, STATE

log = structlog.get_logger()

_CLIENT_CLOSED_REQUEST = 499  # for the log only; nobody is left to read it


@web.middleware
async def outermost(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every exception into a reply, and logs the call."""
    started = time.monotonic()
    route = await _route(request)
    call_id = request[CALL_ID] = new_call_id()
    request[LOG_FIELDS] = {}
    status = _CLIENT_CLOSED_REQUEST
    try:
        response = await _reply(request, handler)
        status = response.status
    finally:
        # Polling by probes and progress bars is no news.
        level = logging.INFO if request.method == "POST" else logging.DEBUG
        log.log(
            level,
            "call",
            request_id=call_id,
            method=request.method,
            path=request.path[:256],
            status=status,
            seconds=round(time.monotonic() - started, 4),
            **request[LOG_FIELDS],
        )
        request.app[STATE].metrics.replied(route, status, request[LOG_FIELDS].get("error", ""))
    return response


async def _route(request: web.Request) -> str:
    """The pattern that the path met, if not with this method; no path that a client made up gets into the metrics."""
    resource = request.match_info.route.resource
    if resource is not None:
        return resource.canonical
    for candidate in request.app.router.resources():
        _, allowed_methods = await candidate.resolve(request)
        if allowed_methods:
            return candidate.canonical
    return "none"


async def add_request_id(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Signal before any reply is sent, also where no middleware ran."""
    response.headers["x-request-id"] = request[CALL_ID] if CALL_ID in request else new_call_id()


def new_call_id() -> str:
    return f"req_{secrets.token_hex(12)}"


async def _reply(request: web.Request, handler: Handler) -> web.StreamResponse:
    headers: dict[str, str] = {}
    try:
        return await handler(request)
    except ApiError as raised:
        error = raised
    except web.HTTPException as raised:
        error = _from_aiohttp(request, raised)
        if isinstance(raised, web.HTTPMethodNotAllowed):
            headers["Allow"] = ", ".join(sorted(raised.allowed_methods))
    except asyncio.CancelledError:
        raise
    except Exception:  # a fault of ours must end this call alone, and its client must get an answer
        log.exception("unexpected error", request_id=request[CALL_ID], path=request.path[:256])
        error = ApiError(
            f"internal error; the log tells more under {request[CALL_ID]}",
            status=500,
            type="server_error",
            code="internal",
        )
    request[LOG_FIELDS]["error"] = error.code or error.type
    response = error_response(error)
    response.headers.update(headers)
    return response


def _from_aiohttp(request: web.Request, error: web.HTTPException) -> ApiError:
    """aiohttp's own exceptions, in our shape."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        message, code = f"{request.path[:256]} does not take {request.method}", "method_not_allowed"
    elif isinstance(error, web.HTTPNotFound):
        message, code = f"there is no {request.path[:256]} here", "unknown_url"
    elif isinstance(error, web.HTTPRequestEntityTooLarge):
        message, code = f"the body is larger than {request.client_max_size:,} bytes", "body_too_large"
    else:
        message, code = error.reason, None
    return ApiError(
        message,
        status=error.status,
        type="invalid_request_error" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error",
        code=code,
    )
