"""The errors that cross a process boundary, as data.

Role: one list of codes, used by workers and the scheduler to say why a request ended and by the gateway to choose an
HTTP status. What a peer does with a code is its own business; no HTTP here.
"""

from typing import Literal

from msgspec import Struct

ErrorCode = Literal[
    "invalid_request",  # the request itself can't be served; `param` names the field
    "model_not_found",
    "content_policy_violation",  # the checkpoint's own safety checker refused the picture
    "queue_full",  # refused at once, nothing was accepted; try again later
    "no_worker",  # nobody serves the model at present
    "generation_failed",  # the pipeline raised on this request
    "non_finite",  # NaN or infinity in the latents or in the decoded picture
    "out_of_memory",
    "worker_lost",  # its workers were lost, or lost it, more often than it may be dispatched
    "undelivered",  # the picture was made, but its gateway did not take it in time
    "deadline_exceeded",
    "aborted",
    "protocol_mismatch",
    "internal",
    "worker_died_twice",  # while they worked on it: it is likely the cause, and no other worker is given it
]


class ErrorInfo(Struct, frozen=True):
    """Why something ended, in words for the one who asked for it."""

    code: ErrorCode
    message: str
    param: str | None = None  # the request field at fault, by its API name


class StepweaveError(Exception):
    """Base of the errors that this project raises on purpose."""


class RequestError(StepweaveError):
    """One request can't go on. Ends that request alone; carries what its client is told."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(f"{info.code}: {info.message}")
        self.info = info


class ProtocolError(StepweaveError):
    """A frame that is no message of ours. It is counted and dropped; a receive loop survives it."""


class ConfigError(StepweaveError):
    """A setting that can't be used. Stops the start with a message and no traceback."""
