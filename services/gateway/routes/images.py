"""POST /v1/images/generations.

Role: reads the body, has it validated, submits the requests, waits for their one outcome and replies. However the
handler ends (a client that goes away cancels it), what is not over yet is aborted.
"""

import asyncio
import secrets
from http import HTTPStatus

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_exceptions import HTTPException

from services.gateway.errors import ApiError, invalid
from services.gateway.pending import PendingCall, Picture
from services.gateway.responses import images_body
from services.gateway.schema import ImageCall, image_call, read_json
from services.gateway.state import CALL_ID, LOG_FIELDS, STATE, GatewayState

READ_TIMEOUT_S = 30.0  # for a body to arrive
MAX_CLIENT_ID_CHARS = 512
_INLINE_BYTES = 1024 * 1024  # a reply of more picture bytes than this is put together in a thread


async def generate(request: web.Request) -> web.Response:
    """Draws pictures of a prompt."""
    state = request.app[STATE]
    client_request_id = _client_request_id(request)
    body = read_json(await _read(request))
    asked = image_call(body, state.models, state.home, request[CALL_ID], _draw_seed)
    params = asked.requests[0].params
    request[LOG_FIELDS].update(
        client_request_id=client_request_id,
        model=asked.profile.model,
        n=len(asked.requests),
        size=f"{params.width}x{params.height}",
        steps=params.num_inference_steps,
    )
    call = state.calls.open(request[CALL_ID], client_request_id, asked.requests)
    try:
        state.control.submit(call)
        pictures = await state.calls.wait(call, state.request_timeout_s)
        request[LOG_FIELDS]["worker_ids"] = sorted({picture.message.worker_id for picture in pictures})
        reply = await _reply(call, asked, pictures)
    finally:
        _close(state, call)
    return web.Response(body=reply, content_type="application/json")


async def _read(request: web.Request) -> bytes:
    content_type = request.content_type  # application/octet-stream where the client names none
    if content_type not in ("application/json", "application/octet-stream") and not content_type.endswith("+json"):
        raise invalid(None, f"the body must be application/json, not {content_type[:64]}")
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise ApiError(
            f"the body did not arrive within {READ_TIMEOUT_S:g} s", status=HTTPStatus.REQUEST_TIMEOUT
        ) from None
    except HTTPException:
        raise
    except (HttpProcessingError, web.RequestPayloadError) as error:  # broken chunks, a body that is not as encoded
        raise invalid(None, f"the body can't be read: {str(error)[:128]}") from None


def _client_request_id(request: web.Request) -> str:
    """What the client calls this call, for progress queries and the log."""
    name = request.headers.get("X-Client-Request-Id", "")
    if len(name) > MAX_CLIENT_ID_CHARS or not (name.isascii() and name.isprintable()):
        raise invalid(
            "X-Client-Request-Id",
            f"X-Client-Request-Id must be at most {MAX_CLIENT_ID_CHARS} printable ASCII characters",
        )
    return name


async def _reply(call: PendingCall, asked: ImageCall, pictures: list[Picture]) -> bytes:
    if sum(picture.payload.nbytes for picture in pictures) <= _INLINE_BYTES:
        return images_body(call, asked, pictures)
    return await asyncio.get_running_loop().run_in_executor(None, images_body, call, asked, pictures)


def _close(state: GatewayState, call: PendingCall) -> None:
    unfinished = state.calls.close(call)
    if unfinished:
        state.control.abort(unfinished, call.error.message if call.error is not None else "the client went away")


def _draw_seed() -> int:
    return secrets.randbits(32)
