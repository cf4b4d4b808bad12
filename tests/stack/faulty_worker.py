"""A worker whose pipeline fails where the prompt says: `fail METHOD` raises, `nan METHOD` computes NaN, `break METHOD`
has a broken device, and of `die METHOD` the process dies.

A program of the tests: `python -m tests.stack.faulty_worker` takes the flags of `stepweave worker`.
"""

import functools
import os
import signal
import sys
from typing import Any

import torch

from common.params import DiffusionRequest
from services import cli
from services.worker import service
from services.worker.loader import load_pipeline
from services.worker.state import DiffusionRequestState


class FaultyPipeline:
    """A `StepPipeline` around another, with faults on demand."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.device, self.mixes, self.heeds_prompt_mask = inner.device, inner.mixes, inner.heeds_prompt_mask
        self.profile = inner.profile

    def prepare_encode(self, request: DiffusionRequest) -> DiffusionRequestState:
        _fail_if_asked(request.params.prompt, "prepare_encode")
        state: DiffusionRequestState = self._inner.prepare_encode(request)
        return state

    def denoise_step(self, input_batch: Any) -> torch.Tensor:
        noise_pred: torch.Tensor = self._inner.denoise_step(input_batch).clone()
        for index, state in enumerate(input_batch.states):
            _fail_if_asked(state.request.params.prompt, "denoise_step")
            if state.request.params.prompt == "nan denoise_step":
                noise_pred[index] = torch.nan
        return noise_pred

    def step_scheduler(self, state: DiffusionRequestState, noise_pred: torch.Tensor) -> torch.Tensor:
        _fail_if_asked(state.request.params.prompt, "step_scheduler")
        latents: torch.Tensor = self._inner.step_scheduler(state, noise_pred)
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


def _load(*arguments: str) -> Any:
    return FaultyPipeline(load_pipeline(*arguments))


if __name__ == "__main__":
    service.serve_worker = functools.partial(service.serve_worker, load=_load)  # type: ignore[assignment]
    sys.argv.insert(1, "worker")
    cli.main()
