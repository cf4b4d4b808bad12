"""Requests through the real runner and side executor, tick by tick, without plans and sockets."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from msgspec.structs import replace
from PIL import Image

from common.errors import ErrorInfo, RequestError
from common.params import DiffusionRequest
from services.worker.input_batch import StepInputBatch
from services.worker.pipelines.protocol import StepPipeline, Video
from services.worker.preparation import Preparation
from services.worker.runner import StepRunner
from services.worker.side import SideExecutor
from services.worker.state import Conditioning, DiffusionRequestState
from tests import builders
from tests.worker.solo import in_its_terms

Outcome = Image.Image | Video | ErrorInfo


def request(request_id: str, **changes: Any) -> DiffusionRequest:
    """A request of the size that the tiny checkpoints draw."""
    values: dict[str, Any] = {"prompt": "a red apple on a wooden table", "height": 32, "width": 32}
    return builders.request(request_id, **(values | {"num_inference_steps": 6, "guidance_scale": 5.0} | changes))


LONG = "an oil painting of a yellow school bus and a cat with sunglasses beside an old house by a lake at night in rain"

# One word beside the longest prompt, guidance off beside on, negatives given and not, other seeds and step counts.
CROWD: dict[int, list[DiffusionRequest]] = {
    0: [
        request("one-word", prompt="frog", seed=11),
        request("longest", prompt=LONG, seed=12, num_inference_steps=9, guidance_scale=7.0),
    ],
    2: [request("unguided", prompt="blue bicycle", seed=13, guidance_scale=1.0, num_inference_steps=5)],
    3: [request("negative", seed=14, negative_prompt="blurry, ugly, watermark", guidance_scale=2.5)],
    5: [request("last", prompt="", seed=15, num_inference_steps=4)],
}
EVERYBODY = [member for members in CROWD.values() for member in members]


def prepared(pipeline: StepPipeline, request: DiffusionRequest) -> DiffusionRequestState:
    """The state of a request, its texts encoded anew."""
    return Preparation(pipeline).prepare_one(replace(request, params=in_its_terms(pipeline, request.params)))


async def draw_together(
    pipeline: StepPipeline,
    joins: Mapping[int, list[DiffusionRequest]],
    aborts: Mapping[int, list[str]] = MappingProxyType({}),
) -> dict[str, Outcome]:
    """All requests in one group, each from its tick on; each one's picture, or why there is none. Those that are
    aborted leave at their tick, and have neither."""
    side = SideExecutor(pipeline, Preparation(pipeline).prepare, threads=1)
    runner = StepRunner(pipeline, threads=1)
    outcomes: dict[str, Outcome] = {}
    running: list[DiffusionRequestState] = []
    tick = 0
    try:
        while running or any(at >= tick for at in joins):
            for member in joins.get(tick, []):
                newcomer = replace(member, params=in_its_terms(pipeline, member.params))
                try:
                    state = await side.prepare(newcomer, 1)
                except RequestError as error:
                    outcomes[newcomer.request_id] = error.info
                    continue
                runner.add(state)
                running.append(state)
            for request_id in aborts.get(tick, []):
                running = [state for state in running if state.request_id != request_id]
                runner.remove(request_id)
            if running:
                with torch.inference_mode():
                    failed = runner.run_group(running).failed
                outcomes |= {state.request_id: error for state, error in failed}
                running = [state for state in running if state.request_id not in outcomes]
            for state in [state for state in running if state.step_index == state.total_steps]:
                running.remove(state)
                runner.remove(state.request_id)
                try:
                    outcomes[state.request_id] = await side.decode(state)
                except RequestError as error:
                    outcomes[state.request_id] = error.info
            tick += 1
    finally:
        side.close()
    return outcomes


class Wrapped:
    """A `StepPipeline` that does what another does. Tests override one method."""

    def __init__(self, inner: StepPipeline) -> None:
        self.inner = inner
        self.device = inner.device
        self.mixes = inner.mixes
        self.heeds_prompt_mask = inner.heeds_prompt_mask
        self.prompts, self.encode_prompts = inner.prompts, inner.encode_prompts

    def profile(self, model: str, max_num_inference_steps: int) -> Any:
        return self.inner.profile(model, max_num_inference_steps)

    def prepare_encode(
        self, request: DiffusionRequest, cond: Conditioning, uncond: Conditioning | None
    ) -> DiffusionRequestState:
        return self.inner.prepare_encode(request, cond, uncond)

    def denoise_step(self, input_batch: StepInputBatch) -> Sequence[torch.Tensor]:
        return self.inner.denoise_step(input_batch)

    def step_scheduler(
        self, states: Sequence[DiffusionRequestState], noise_preds: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | Exception]:
        return self.inner.step_scheduler(states, noise_preds)

    def post_decode(self, state: DiffusionRequestState) -> Image.Image | Video:
        return self.inner.post_decode(state)
