"""JSON replies: errors in OpenAI's shape, and the reply to an images call.

Role: data to bytes. It decides no status of its own.
"""

import binascii
import json
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from common.messages import ModelProfile
from common.rows import row_tokens
from services.gateway.errors import ApiError
from services.gateway.pending import PendingCall, PendingRequest, Picture
from services.gateway.schema import ImageCall

# base64 holds the interpreter lock, so a large file is done in pieces (about a millisecond each) between which other
# threads, the event loop among them, get their turn. A multiple of 3, so that the pieces join without padding.
_BASE64_PIECE_BYTES = 768 * 1024


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A reply in ASCII JSON, which also carries what a client sent that is no valid Unicode."""
    return web.json_response(body, status=status, headers=headers, dumps=json.dumps)


def error_response(error: ApiError) -> web.Response:
    return json_response(error.body, error.status, error.headers)


def images_body(call: PendingCall, asked: ImageCall, pictures: Sequence[Picture]) -> bytes:
    """The reply to a call whose pictures are all here. CPU work; for large pictures run it in a thread.

    `timings` are seconds. Those of a picture: in each stage of its worker, from call to arrival (`total_s`), and the
    rest of that, in which it waited for a worker, for a place in the batch or on its way (`queue_s`). The call's own
    are the largest of its pictures', which are drawn side by side.
    """
    first = pictures[0].message
    timings = [_timings(call, request, picture) for request, picture in zip(call.requests, pictures, strict=True)]
    warnings = dict.fromkeys([*asked.warnings, *(text for picture in pictures for text in picture.message.warnings)])
    return msgspec.json.encode(
        {
            "created": call.created,
            "data": [
                {"b64_json": _base64_json(picture.payload), "seed": request.seed, "timings": seconds}
                for request, picture, seconds in zip(call.requests, pictures, timings, strict=True)
            ],
            "model": call.model,
            "size": f"{first.width}x{first.height}",
            "quality": asked.quality,
            "background": "opaque",
            "output_format": first.output_format,
            "usage": _usage(asked.profile, pictures),
            "seed": call.requests[0].seed,
            "timings": {name: max(seconds[name] for seconds in timings) for name in timings[0]},
            "warnings": list(warnings),
            "request_id": call.call_id,
        }
    )


def progress(call: PendingCall) -> dict[str, Any]:
    """How far a call is."""
    if call.ended_at is None:
        status = "pending"
    elif call.error is not None:
        status = "failed"
    else:
        status = "completed" if all(request.ended == "completed" for request in call.requests) else "aborted"
    return {
        "id": call.call_id,
        "object": "request",
        "client_request_id": call.client_request_id or None,
        "model": call.model,
        "created": call.created,
        "status": status,
        "error": call.error.body["error"] if call.error is not None else None,
        "data": [_progress(index, request) for index, request in enumerate(call.requests)],
    }


def _progress(index: int, request: PendingRequest) -> dict[str, Any]:
    update = request.update
    total_steps = update.total_steps if update is not None else 0
    return {
        "index": index,
        "request_id": request.request_id,
        "seed": request.seed,
        "status": request.status,
        "step_index": total_steps if request.ended == "completed" else (update.step_index if update else 0),
        "total_steps": total_steps,
        "queue_position": update.queue_position if update is not None and request.status == "waiting" else 0,
        "estimated_s": update.estimated_s if update is not None and not request.ended else None,
    }


def _timings(call: PendingCall, request: PendingRequest, picture: Picture) -> dict[str, float]:
    stages = msgspec.structs.asdict(picture.message.timings)
    total_s = picture.arrived_at - call.opened_at
    queue_s = max(0.0, total_s - sum(stages.values()))
    return {name: round(seconds, 6) for name, seconds in {"queue_s": queue_s, **stages, "total_s": total_s}.items()}


def _usage(profile: ModelProfile, pictures: Sequence[Picture]) -> dict[str, Any]:
    """Image tokens are the denoiser's own, of one row. Prompt tokens are not counted here, and given as zero."""
    messages = [picture.message for picture in pictures]
    image_tokens = sum(row_tokens(each.height, each.width, each.num_frames, profile.size) for each in messages)
    return {
        "input_tokens": 0,
        "input_tokens_details": {"text_tokens": 0, "image_tokens": 0},
        "output_tokens": image_tokens,
        "output_tokens_details": {"text_tokens": 0, "image_tokens": image_tokens},
        "total_tokens": image_tokens,
    }


def _base64_json(payload: memoryview) -> msgspec.Raw:
    """The payload as a JSON string."""
    pieces = [b'"']
    for start in range(0, payload.nbytes, _BASE64_PIECE_BYTES):
        pieces.append(binascii.b2a_base64(payload[start : start + _BASE64_PIECE_BYTES], newline=False))
    pieces.append(b'"')
    return msgspec.Raw(b"".join(pieces))
