"""Newcomers on their way to the denoise stream: `Preparation`.

Role: texts to embeddings, then requests to states. A text is encoded once as long as it is remembered (`PromptCache`),
and those of several newcomers that are not are encoded in one call. One request's trouble is its own. It lives on the
side thread; it knows neither plans nor sockets.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import torch

from common.params import DiffusionRequest
from services.worker.halving import in_halves
from services.worker.pipelines.protocol import Prompts, StepPipeline
from services.worker.state import Conditioning, DiffusionRequestState, EncodedPrompt, PromptText

ENCODED_TOGETHER = 8  # texts in one call of the text encoders, so that its memory has a bound


class PromptCache:
    """Encoded texts, the least recently used of which make room for new ones."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes  # 0: nothing is kept
        self._kept: OrderedDict[PromptText, EncodedPrompt] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, prompt: PromptText) -> EncodedPrompt | None:
        encoded = self._kept.get(prompt)
        if encoded is not None:
            self._kept.move_to_end(prompt)
        return encoded

    def put(self, prompt: PromptText, encoded: EncodedPrompt) -> None:
        if prompt in self._kept:
            return
        self._kept[prompt] = encoded
        self.nbytes += _nbytes(encoded)
        while self.nbytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.nbytes -= _nbytes(dropped)


class _Wanted(NamedTuple):
    """A text that is to be encoded, and the first request that needs it."""

    request_id: str
    prompt: PromptText


class Preparation:
    """One for a pipeline. Its lock is also that of the tokenizers, which keep padding and truncation as state."""

    def __init__(self, pipeline: StepPipeline, cache_bytes: int = 2**20) -> None:
        self._pipeline = pipeline
        self._lock = threading.Lock()
        self.cache = PromptCache(cache_bytes)
        self.encoded = 0  # texts given to the text encoders
        self.reused = 0  # texts whose embedding was there already

    def prepare(self, requests: Sequence[DiffusionRequest]) -> list[DiffusionRequestState | Exception]:
        """The state of each request, or what it failed of."""
        with self._lock:
            prompts = [self._prompts(request) for request in requests]
            encoded = self._encode(requests, prompts)
            return [self._state(*each, encoded) for each in zip(requests, prompts, strict=True)]

    def prepare_one(self, request: DiffusionRequest) -> DiffusionRequestState:
        """The state of a request. Raises what it failed of."""
        (state,) = self.prepare([request])
        if isinstance(state, Exception):
            raise state
        return state

    def _prompts(self, request: DiffusionRequest) -> Prompts | Exception:
        try:
            return self._pipeline.prompts(request)
        except Exception as error:  # foreign code: whatever it raises ends this request alone
            return error

    def _encode(
        self, requests: Sequence[DiffusionRequest], prompts: Sequence[Prompts | Exception]
    ) -> dict[PromptText, EncodedPrompt | Exception]:
        """Each text of each request, from the cache or encoded now."""
        found: dict[PromptText, EncodedPrompt | Exception] = {}
        wanted: dict[PromptText, _Wanted] = {}
        for request, pair in zip(requests, prompts, strict=True):
            for prompt in () if isinstance(pair, Exception) else pair:
                if prompt is None:
                    continue
                encoded = self.cache.get(prompt)
                if encoded is not None:
                    found[prompt] = encoded
                if encoded is not None or prompt in wanted:
                    self.reused += 1
                else:
                    wanted[prompt] = _Wanted(request.request_id, prompt)
        for call in _calls(list(wanted.values())):
            self._encode_call(call, found)
        return found

    def _encode_call(self, call: list[_Wanted], found: dict[PromptText, EncodedPrompt | Exception]) -> None:
        def encode(part: list[_Wanted]) -> list[EncodedPrompt]:
            encoded = self._pipeline.encode_prompts([wanted.prompt for wanted in part])
            return [_owned(one) for one in encoded]

        def on_fault(wanted: _Wanted, error: Exception) -> None:
            found[wanted.prompt] = error

        self.encoded += len(call)
        for part, encoded in in_halves(call, encode, on_fault, self._pipeline.device):
            for wanted, one in zip(part, encoded, strict=True):
                found[wanted.prompt] = one
                self.cache.put(wanted.prompt, one)

    def _state(
        self,
        request: DiffusionRequest,
        prompts: Prompts | Exception,
        encoded: dict[PromptText, EncodedPrompt | Exception],
    ) -> DiffusionRequestState | Exception:
        if isinstance(prompts, Exception):
            return prompts
        cond = encoded[prompts.cond]
        uncond = None if prompts.uncond is None else encoded[prompts.uncond]
        for text in (cond, uncond):
            if isinstance(text, Exception):
                return text
        try:
            uncond_conditioning = None if uncond is None else uncond.conditioning
            state = self._pipeline.prepare_encode(request, cond.conditioning, uncond_conditioning)
        except Exception as error:  # foreign code: whatever it raises ends this request alone
            return error
        state.warnings += tuple(
            f"{field} {cut}"
            for field, text in (("prompt", cond), ("negative_prompt", uncond))
            if text is not None
            for cut in text.cuts
        )
        return state


def _calls(wanted: list[_Wanted]) -> list[list[_Wanted]]:
    """Texts that one call can encode."""
    by_length: dict[int | None, list[_Wanted]] = {}
    for each in wanted:
        by_length.setdefault(each.prompt.max_sequence_length, []).append(each)
    return [
        alike[start : start + ENCODED_TOGETHER]
        for alike in by_length.values()
        for start in range(0, len(alike), ENCODED_TOGETHER)
    ]


def _owned(encoded: EncodedPrompt) -> EncodedPrompt:
    """The same without views into a call's whole output, or a text that is kept would keep its neighbours too."""

    def owned(tensor: torch.Tensor | None) -> torch.Tensor | None:
        is_view = tensor is not None and tensor.untyped_storage().nbytes() > tensor.nbytes
        return tensor.clone() if is_view else tensor

    parts = {part.name: owned(getattr(encoded.conditioning, part.name)) for part in fields(Conditioning)}
    return replace(encoded, conditioning=replace(encoded.conditioning, **parts))


def _nbytes(encoded: EncodedPrompt) -> int:
    return sum(tensor.nbytes for tensor in encoded.conditioning.tensors())
