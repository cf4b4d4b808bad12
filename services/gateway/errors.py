"""Errors as a client sees them.

Role: `ApiError`, the one exception that becomes an error reply, and the table from the codes that workers and the
scheduler use to HTTP. It knows nothing of aiohttp.
"""

import math
from typing import Literal, NamedTuple

from common.errors import ErrorCode, ErrorInfo, StepweaveError

ErrorType = Literal["invalid_request_error", "rate_limit_error", "server_error"]

DEFAULT_RETRY_AFTER_S = 2.0  # where a retry may help and nobody could say when
_MAX_RETRY_AFTER_S = 3600.0  # an estimate beyond this tells a client nothing more


class HttpError(NamedTuple):
    """What an error code is over HTTP."""

    status: int
    type: ErrorType
    retry: bool  # whether the same call may succeed later


HTTP_ERRORS: dict[ErrorCode, HttpError] = {
    "invalid_request": HttpError(400, "invalid_request_error", retry=False),
    "model_not_found": HttpError(404, "invalid_request_error", retry=False),
    "content_policy_violation": HttpError(400, "invalid_request_error", retry=False),
    "queue_full": HttpError(429, "rate_limit_error", retry=True),
    "no_worker": HttpError(503, "server_error", retry=True),
    "generation_failed": HttpError(500, "server_error", retry=False),
    "non_finite": HttpError(500, "server_error", retry=False),
    "out_of_memory": HttpError(500, "server_error", retry=False),
    "worker_lost": HttpError(500, "server_error", retry=False),  # it had all its attempts: likely the cause itself
    "worker_died_twice": HttpError(500, "server_error", retry=False),  # the same: it must not be tried again
    "undelivered": HttpError(503, "server_error", retry=True),
    "deadline_exceeded": HttpError(504, "server_error", retry=False),
    "aborted": HttpError(503, "server_error", retry=True),
    "protocol_mismatch": HttpError(500, "server_error", retry=False),
    "internal": HttpError(500, "server_error", retry=False),
}


class ApiError(StepweaveError):
    """Ends a call with an error reply in OpenAI's shape."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: ErrorType = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.retry = retry
        self.retry_after_s = retry_after_s  # only with `retry`

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """The reply's JSON."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """What tells a client whether and when to try again. The official one obeys all three."""
        if not self.retry:
            return {"x-should-retry": "false"}
        seconds = DEFAULT_RETRY_AFTER_S if self.retry_after_s is None else self.retry_after_s
        if not 0 <= seconds <= _MAX_RETRY_AFTER_S:  # false for NaN too
            seconds = _MAX_RETRY_AFTER_S if seconds > 0 else DEFAULT_RETRY_AFTER_S
        return {
            "x-should-retry": "true",
            "Retry-After": str(max(1, math.ceil(seconds))),
            "retry-after-ms": str(max(1, math.ceil(seconds * 1000))),
        }


def from_info(info: ErrorInfo, retry_after_s: float | None = None) -> ApiError:
    """The reply to an error that a worker or the scheduler reported."""
    http = HTTP_ERRORS[info.code]
    return ApiError(
        info.message,
        status=http.status,
        type=http.type,
        param=info.param,
        code=info.code,
        retry=http.retry,
        retry_after_s=retry_after_s,
    )


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 that names the field at fault (None: the body as a whole)."""
    return ApiError(message, param=param, code=code)
