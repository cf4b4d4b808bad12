"""What is done beside the denoise loop: preparing newcomers, decoding the finished, writing image files.

Role: `SideExecutor`, one thread (on CUDA with a stream of its own) for the model's parts, and a small pool for image
files. Its callers see three coroutines; nothing in them says that the work is done in this process.
"""

import time
from functools import partial

from PIL import Image

from common.errors import ErrorInfo, RequestError
from common.params import DiffusionRequest
from services.worker.image import encode_image
from services.worker.jobs import JobThreads
from services.worker.pipelines.protocol import StepPipeline
from services.worker.pipelines.whole_call import WholeCallPipeline
from services.worker.request_batch import RequestState
from services.worker.runner import describe
from services.worker.state import DiffusionRequestState
from services.worker.streams import mark, take_over, torch_thread

IMAGE_THREADS = 2  # compressing pictures releases the interpreter lock


class SideExecutor:
    """Owned by the event loop. Its coroutines raise `RequestError` and nothing else for what a request does wrong."""

    def __init__(self, pipeline: StepPipeline | WholeCallPipeline, threads: int = 0) -> None:
        self._pipeline = pipeline
        self._model_jobs = JobThreads("side", 1, partial(torch_thread, pipeline.device, threads))
        self._image_jobs = JobThreads("image", IMAGE_THREADS)

    async def prepare(self, request: DiffusionRequest, attempt: int) -> DiffusionRequestState | RequestState:
        """The request's state, ready for the denoise stream."""
        return await self._model_jobs.run(self._prepare, request, attempt)

    async def decode(self, state: DiffusionRequestState | RequestState) -> Image.Image:
        """The finished picture."""
        return await self._model_jobs.run(self._decode, state)

    async def write(self, state: DiffusionRequestState | RequestState, image: Image.Image) -> bytes:
        """The picture's file."""
        return await self._image_jobs.run(self._write, state, image)

    def close(self, timeout_s: float = 0.0) -> None:
        self._model_jobs.close(timeout_s)
        self._image_jobs.close(timeout_s)

    def _prepare(self, request: DiffusionRequest, attempt: int) -> DiffusionRequestState | RequestState:
        begun = time.perf_counter()
        try:
            state = self._pipeline.prepare_encode(request)
        except Exception as error:  # foreign code: whatever it raises ends this request alone
            raise _request_error(error, "preparing the request") from error
        state.attempt = attempt
        state.ready = mark(self._pipeline.device)
        state.timings.encode_s = time.perf_counter() - begun
        return state

    def _decode(self, state: DiffusionRequestState | RequestState) -> Image.Image:
        begun = time.perf_counter()
        take_over(state.ready, state.tensors())
        try:
            image = self._pipeline.post_decode(state)
        except Exception as error:  # foreign code: whatever it raises ends this request alone
            raise _request_error(error, "decoding the picture") from error
        state.timings.decode_s = time.perf_counter() - begun
        return image

    def _write(self, state: DiffusionRequestState | RequestState, image: Image.Image) -> bytes:
        begun = time.perf_counter()
        try:
            data = encode_image(image, state.request)
        except (OSError, ValueError) as error:  # what Pillow raises on a picture that a format can't hold
            raise RequestError(ErrorInfo("generation_failed", f"writing the image file failed: {error}")) from error
        state.timings.image_s = time.perf_counter() - begun
        return data


def _request_error(error: Exception, where: str) -> RequestError:
    return error if isinstance(error, RequestError) else RequestError(describe(error, where))
