"""A worker whose pipeline fails where the prompt says: `fail METHOD` raises, `nan METHOD` computes NaN, `break METHOD`
has a broken device, and of `die METHOD` the process dies.

A program of the tests: `python -m tests.stack.faulty_worker` takes the flags of `stepweave worker`.
"""

import functools
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import torch

from common.params import DiffusionRequest
from services import cli
from services.worker import service
from services.worker.loader import load_pipeline
from services.worker.state import Conditioning, DiffusionRequestState, EncodedPrompt, PromptText


class FaultyPipeline:
    """A `StepPipeline` around another, with faults on demand."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.device, self.mixes, self.heeds_prompt_mask = inner.device, inner.mixes, inner.heeds_prompt_mask
        self.profile, self.prompts = inner.profile, inner.prompts

    def encode_prompts(self, prompts: Sequence[PromptText]) -> list[EncodedPrompt]:
        for prompt in prompts:
            _fail_if_asked(str(prompt.text), "encode_prompts")
        encoded: list[EncodedPrompt] = self._inner.encode_prompts(prompts)
        return encoded

    def prepare_encode(
        self, request: DiffusionRequest, cond: Conditioning, uncond: Conditioning | None
    ) -> DiffusionRequestState:
        _fail_if_asked(request.params.prompt, "prepare_encode")
        state: DiffusionRequestState = self._inner.prepare_encode(request, cond, uncond)
        return state

    def denoise_step(self, input_batch: Any) -> list[torch.Tensor]:
        noise_preds: list[torch.Tensor] = list(self._inner.denoise_step(input_batch))
        for index, state in enumerate(input_batch.states):
            _fail_if_asked(state.request.params.prompt, "denoise_step")
            if state.request.params.prompt == "nan denoise_step":
                noise_preds[index] = torch.full_like(noise_preds[index], torch.nan)
        return noise_preds

    def step_scheduler(
        self, states: Sequence[DiffusionRequestState], noise_preds: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | Exception]:
        latents: list[torch.Tensor | Exception] = self._inner.step_scheduler(states, noise_preds)
        for index, state in enumerate(states):
            try:
                _fail_if_asked(state.request.params.prompt, "step_scheduler")
            except RuntimeError as error:
                latents[index] = error
        return latents

    def post_decode(self, state: DiffusionRequestState) -> Any:
        _fail_if_asked(state.request.params.prompt, "post_decode")
        if state.request.params.prompt == "nan post_decode":
            state.latents = torch.full_like(state.latents, torch.nan)
        return self._inner.post_decode(state)


def _fail_if_asked(prompt: str, method: str) -> None:
    if prompt == f"fail {method}":
        raise RuntimeError(f"{method} was asked to fail")
    if prompt == f"break {method}":
        raise torch.AcceleratorError(f"{method} was asked to break the device")
    if prompt == f"die {method}":
        os.kill(os.getpid(), signal.SIGKILL)


def _load(*arguments: Any) -> Any:
    return FaultyPipeline(load_pipeline(*arguments))


if __name__ == "__main__":
    service.serve_worker = functools.partial(service.serve_worker, load=_load)  # type: ignore[assignment]
    sys.argv.insert(1, "worker")
    cli.main()
