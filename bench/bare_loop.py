"""The bare batched loop: what a checkpoint can do on this machine with nothing of Stepweave's around it.

Role: `BareLoop`, which draws a batch of pictures from their prompts to their PNG files as fast as one thread can: each
request is encoded, then all are denoised together from the first step to the last, then each is decoded and written.
Encoding, decoding and files are the worker's own work, request by request, since requests come singly. The loop has no
plans and no messages, gathers nothing, and steps one solver for the whole batch. It has a thread of its own, as a
worker's steps have: on the main thread the same work was seen 4 to 14 % slower.

As a program, `python -m bench.bare_loop CHECKPOINT SHAPE GUIDANCE BATCH THREADS`, it loads, says so, and then for each
line with a number on its input draws so many batches and answers with the seconds they took.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from msgspec.structs import replace
from PIL import Image

from bench.workload import PROMPTS, call_seed, parse_shapes
from common.params import DataHome, DiffusionRequest, SamplingParams
from services.worker import prepare_environment
from services.worker.image import encode_image
from services.worker.input_batch import StepInputBatch
from services.worker.loader import load_pipeline
from services.worker.pipelines.protocol import StepPipeline
from services.worker.preparation import Preparation
from services.worker.state import DiffusionRequestState
from services.worker.streams import synchronize, torch_thread

NOWHERE = DataHome(gateway_id="", address="")


class BareLoop:
    """Batches of requests that differ in prompt and seed, with so many torch threads."""

    def __init__(self, pipeline: StepPipeline, params: SamplingParams, threads: int) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._on_thread = torch_thread(pipeline.device, threads)
        self._thread.submit(self._on_thread.__enter__).result()
        self._pipeline = pipeline
        self._preparation = Preparation(pipeline)
        self._params = params  # of all of them; each has a prompt and a seed of its own
        self._drawn = 0

    def draw(self, batch_size: int) -> list[bytes]:
        """The PNG files of `batch_size` pictures that were not drawn before."""
        states = [self._preparation.prepare_one(self._request()) for _ in range(batch_size)]
        self._denoise(states)
        return [self._file(state) for state in states]

    def seconds(self, batch_size: int, batches: int = 1) -> float:
        """How long so many batches take."""
        return self._thread.submit(self._seconds, batch_size, batches).result()

    def _seconds(self, batch_size: int, batches: int) -> float:
        begun = time.perf_counter()
        for _ in range(batches):
            self.draw(batch_size)
        synchronize(self._pipeline.device)
        return time.perf_counter() - begun

    def _denoise(self, states: Sequence[DiffusionRequestState]) -> None:
        batch = StepInputBatch(states)
        count = batch.requests
        # One state with everybody's latents: its solver steps them all at once.
        whole = dataclasses.replace(states[0], latents=torch.cat([state.latents for state in states]))
        while whole.step_index < whole.total_steps:
            assert isinstance(batch.latents, torch.Tensor)  # all are of one shape
            batch.latents[:count] = whole.model_input()
            if batch.rows > count:
                batch.latents[count:] = batch.latents[batch.guided]
            batch.timesteps[:] = whole.timesteps[whole.step_index]
            noise_pred = torch.cat(list(self._pipeline.denoise_step(batch)))
            (latents,) = self._pipeline.step_scheduler([whole], [noise_pred])
            if isinstance(latents, Exception):
                raise latents
            whole.latents = latents
            whole.step_index += 1
            for state in states:  # some models ask each row's request how far it is
                state.step_index = whole.step_index
        for index, state in enumerate(states):
            state.latents = whole.latents[index : index + 1]

    def _file(self, state: DiffusionRequestState) -> bytes:
        picture = self._pipeline.post_decode(state)
        assert isinstance(picture, Image.Image)  # one frame is asked for
        return encode_image(picture, state.request)

    def _request(self) -> DiffusionRequest:
        number = self._drawn
        self._drawn += 1
        params = replace(self._params, prompt=PROMPTS[number % len(PROMPTS)], seed=call_seed(0, number))
        return DiffusionRequest(request_id=f"bare-{number}", model="", params=params, home=NOWHERE)


def main() -> None:
    checkpoint, shape, guidance_scale, batch_size, threads = sys.argv[1:]
    prepare_environment()  # as a worker does
    pipeline = load_pipeline(checkpoint)
    picture = parse_shapes(shape).values[0]
    params = SamplingParams(  # as a call over HTTP asks, that is as the stack is asked beside it
        prompt="",
        height=picture.height,
        width=picture.width,
        num_inference_steps=picture.num_inference_steps,
        guidance_scale=float(guidance_scale),
        seed=0,
    )
    loop = BareLoop(pipeline, params, int(threads))
    loop.seconds(int(batch_size))  # pays for one-off work
    _say("ready")
    for line in sys.stdin:
        _say(str(loop.seconds(int(batch_size), int(line))))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
