"""What is done beside the denoise loop: preparing newcomers, decoding the finished, writing image and video files.

Role: `SideExecutor`, one thread (on CUDA with a stream of its own) for the model's parts, and a small pool for
files. Its callers see three coroutines; nothing in them says that the work is done in this process.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import structlog
from PIL import Image

from common.errors import ErrorInfo, RequestError
from common.params import DiffusionRequest
from services.worker.image import encode_image
from services.worker.jobs import JobThreads
from services.worker.pipelines.protocol import StepPipeline, Video
from services.worker.pipelines.whole_call import WholeCallPipeline
from services.worker.request_batch import RequestState
from services.worker.runner import describe
from services.worker.state import DiffusionRequestState
from services.worker.streams import mark, take_over, torch_thread
from services.worker.video import encode_video

log = structlog.get_logger()

IMAGE_THREADS = 2  # compressing pictures releases the interpreter lock
PREPARED_TOGETHER = 8  # newcomers in one job, so that a finished picture does not wait long for its decode

State = DiffusionRequestState | RequestState
# Of several requests at once: the state of each, or what it failed of.
Prepare = Callable[[Sequence[DiffusionRequest]], Sequence[State | Exception]]


class _Newcomer(NamedTuple):
    """A request that waits to be prepared."""

    request: DiffusionRequest
    attempt: int
    outcome: "Future[State]"


class SideExecutor:
    """Owned by the event loop. Its coroutines raise `RequestError` and nothing else for what a request does wrong."""

    def __init__(self, pipeline: StepPipeline | WholeCallPipeline, prepare: Prepare, threads: int = 0) -> None:
        self._pipeline = pipeline
        self._prepare_all = prepare
        self._newcomers: deque[_Newcomer] = deque()  # bounded by what the shell holds
        self._model_jobs = JobThreads("side", 1, partial(torch_thread, pipeline.device, threads))
        self._image_jobs = JobThreads("image", IMAGE_THREADS)

    async def prepare(self, request: DiffusionRequest, attempt: int) -> State:
        """The request's state, ready for the denoise stream. Those that wait at the same time are prepared together."""
        newcomer = _Newcomer(request, attempt, Future())
        self._newcomers.append(newcomer)
        self._model_jobs.put(self._prepare_newcomers)  # finds nobody if the job before it took this one along
        return await asyncio.wrap_future(newcomer.outcome)

    async def decode(self, state: State) -> Image.Image | Video:
        """The finished picture or video."""
        return await self._model_jobs.run(self._decode, state)

    async def write(self, state: State, decoded: Image.Image | Video) -> bytes:
        """Its file."""
        return await self._image_jobs.run(self._write, state, decoded)

    def close(self, timeout_s: float = 0.0) -> None:
        self._model_jobs.close(timeout_s)
        self._image_jobs.close(timeout_s)

    def _prepare_newcomers(self) -> None:
        begun = time.perf_counter()
        together: list[_Newcomer] = []
        while self._newcomers and len(together) < PREPARED_TOGETHER:
            newcomer = self._newcomers.popleft()
            if newcomer.outcome.set_running_or_notify_cancel():  # else nobody waits for it any more
                together.append(newcomer)
        if not together:
            return
        try:
            states = self._prepare_all([newcomer.request for newcomer in together])
        except Exception as error:  # nobody's own: a device that is broken
            states = [error] * len(together)
        for newcomer, state in zip(together, states, strict=True):
            if isinstance(state, Exception):
                newcomer.outcome.set_exception(_request_error(state, "preparing the request"))
                continue
            state.attempt = newcomer.attempt
            state.ready = mark(self._pipeline.device)
            state.timings.encode_s = time.perf_counter() - begun
            newcomer.outcome.set_result(state)

    def _decode(self, state: State) -> Image.Image | Video:
        begun = time.perf_counter()
        take_over(state.ready, state.tensors())
        try:
            decoded = self._pipeline.post_decode(state)
        except Exception as error:  # foreign code: whatever it raises ends this request alone
            raise _request_error(error, "decoding the picture") from error
        state.timings.decode_s = time.perf_counter() - begun
        return decoded

    def _write(self, state: State, decoded: Image.Image | Video) -> bytes:
        begun = time.perf_counter()
        try:
            if isinstance(decoded, Video):
                data = encode_video(decoded, state.request)
            else:
                data = encode_image(decoded, state.request)
        except (OSError, ValueError) as error:  # what the libraries raise on a picture that a format can't hold
            raise RequestError(ErrorInfo("generation_failed", f"writing the file failed: {error}")) from error
        state.timings.image_s = time.perf_counter() - begun
        return data


def one_by_one(prepare: Callable[[DiffusionRequest], State]) -> Prepare:
    """For a pipeline that gains nothing from preparing several at once."""

    def prepare_all(requests: Sequence[DiffusionRequest]) -> list[State | Exception]:
        outcomes: list[State | Exception] = []
        for request in requests:
            try:
                outcomes.append(prepare(request))
            except Exception as error:  # foreign code: whatever it raises ends this request alone
                outcomes.append(error)
        return outcomes

    return prepare_all


def _request_error(error: Exception, where: str) -> RequestError:
    if isinstance(error, RequestError):
        return error
    log.warning("a request failed", where=where, exc_info=error)
    failed = RequestError(describe(error, where))
    failed.__cause__ = error
    return failed
