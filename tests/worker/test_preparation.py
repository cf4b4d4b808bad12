"""Newcomers: each text is encoded once, several in one call, and every request still gets what it would get alone."""

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from common.errors import RequestError
from common.params import DiffusionRequest
from services.worker.pipelines.protocol import StepPipeline
from services.worker.preparation import ENCODED_TOGETHER, Preparation, PromptCache
from services.worker.side import PREPARED_TOGETHER, SideExecutor, State
from services.worker.state import Conditioning, DiffusionRequestState, EncodedPrompt, PromptText
from tests.worker.driving import LONG, Wrapped, request
from tests.worker.masked import MaskedPipeline


class Counting(Wrapped):
    """Remembers the calls of the text encoders."""

    def __init__(self, inner: StepPipeline) -> None:
        super().__init__(inner)
        self.calls: list[list[str | None]] = []
        self.encode_prompts = self._encode_prompts

    def _encode_prompts(self, prompts: Sequence[PromptText]) -> list[EncodedPrompt]:
        self.calls.append([prompt.text for prompt in prompts])
        return self.inner.encode_prompts(prompts)


def states(outcomes: Sequence[DiffusionRequestState | Exception]) -> list[DiffusionRequestState]:
    assert not any(isinstance(outcome, Exception) for outcome in outcomes), outcomes
    return list(outcomes)  # type: ignore[arg-type]


def test_the_pictures_of_a_call_are_encoded_once() -> None:
    pipeline = Counting(MaskedPipeline())
    preparation = Preparation(pipeline)
    preparation.prepare([request(f"call-{index}", prompt="frog", seed=index) for index in range(4)])
    assert pipeline.calls == [["frog", "-"]]
    assert (preparation.encoded, preparation.reused) == (2, 6)


def test_a_prompt_that_comes_again_is_not_encoded_again() -> None:
    pipeline = Counting(MaskedPipeline())
    preparation = Preparation(pipeline)
    first = preparation.prepare_one(request("a", prompt="frog"))
    again = preparation.prepare_one(request("b", prompt="frog", seed=7, guidance_scale=1.0))
    assert pipeline.calls == [["frog", "-"]]
    assert again.cond is first.cond


def test_without_room_nothing_is_kept() -> None:
    pipeline = Counting(MaskedPipeline())
    preparation = Preparation(pipeline, cache_bytes=0)
    for name in "ab":
        preparation.prepare_one(request(name, prompt="frog", guidance_scale=1.0))
    assert pipeline.calls == [["frog"], ["frog"]]


def test_texts_are_encoded_together_up_to_a_bound() -> None:
    pipeline = Counting(MaskedPipeline())
    newcomers = [request(str(i), prompt=f"word {i}", guidance_scale=1.0) for i in range(ENCODED_TOGETHER + 3)]
    states(Preparation(pipeline).prepare(newcomers))
    assert [len(call) for call in pipeline.calls] == [ENCODED_TOGETHER, 3]


def test_texts_of_another_length_are_encoded_apart(tiny: Callable[[str], StepPipeline]) -> None:
    pipeline = Counting(tiny("sd3-t5"))
    newcomers = [request(str(length), max_sequence_length=length, guidance_scale=1.0) for length in (12, 40)]
    short, long = states(Preparation(pipeline).prepare(newcomers))
    assert [len(call) for call in pipeline.calls] == [1, 1]
    assert long.cond.prompt_embeds.shape[1] - short.cond.prompt_embeds.shape[1] == 28


def test_a_text_encoded_beside_others_is_what_it_is_alone(pipeline: StepPipeline) -> None:
    texts = ["frog", LONG, "", "low quality, blurry"]
    newcomers = [request(text, prompt=text, negative_prompt="ugly") for text in texts]
    with torch.inference_mode():
        together = states(Preparation(pipeline).prepare(newcomers))
        alone = [Preparation(pipeline).prepare_one(newcomer) for newcomer in newcomers]
    for one, other in zip(together, alone, strict=True):
        for mine, its in zip(one.cond.tensors(), other.cond.tensors(), strict=True):
            assert mine.shape == its.shape
            # Random text encoders have outputs of very different sizes; rounding is a share of the largest.
            largest = max(1.0, float(its.float().abs().max()))
            assert torch.allclose(mine.float(), its.float(), rtol=0, atol=2e-6 * largest)


def test_one_text_that_fails_ends_only_the_requests_that_need_it() -> None:
    class Picky(Counting):
        def _encode_prompts(self, prompts: Sequence[PromptText]) -> list[EncodedPrompt]:
            if any(prompt.text == "bad" for prompt in prompts):
                raise ValueError("no such word")
            return super()._encode_prompts(prompts)

    preparation = Preparation(Picky(MaskedPipeline()))
    newcomers = [request(str(index), prompt=prompt) for index, prompt in enumerate(["good", "bad", "fine", "bad"])]
    outcomes = preparation.prepare(newcomers)
    assert [isinstance(outcome, ValueError) for outcome in outcomes] == [False, True, False, True]
    assert preparation.cache.get(PromptText("bad")) is None


def test_a_text_that_is_kept_does_not_keep_those_beside_it(pipeline: StepPipeline) -> None:
    preparation = Preparation(pipeline)
    newcomers = [request(text, prompt=text) for text in ("frog", "blue bicycle", "a green frog")]
    for state in states(preparation.prepare(newcomers)):
        for tensor in state.cond.tensors():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def encoded(nbytes: int) -> EncodedPrompt:
    return EncodedPrompt(Conditioning(torch.zeros(1, nbytes, 1, dtype=torch.uint8)))


def test_the_text_that_was_not_used_for_longest_makes_room() -> None:
    cache = PromptCache(100)
    for name in "abc":
        cache.put(PromptText(name), encoded(30))
    cache.get(PromptText("a"))
    cache.put(PromptText("d"), encoded(40))
    assert [name for name in "abcd" if cache.get(PromptText(name)) is not None] == ["a", "c", "d"]
    assert cache.nbytes == 100


def test_a_text_larger_than_all_room_is_not_kept() -> None:
    cache = PromptCache(100)
    cache.put(PromptText("a"), encoded(101))
    assert (len(cache), cache.nbytes) == (0, 0)


def test_a_text_that_is_put_twice_counts_once() -> None:
    cache = PromptCache(100)
    for _ in range(2):
        cache.put(PromptText("a"), encoded(30))
    assert cache.nbytes == 30


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


class Gated:
    """Prepares when it is allowed to, and remembers who came together."""

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate
        self.entered = threading.Event()
        self.batches: list[list[str]] = []

    def __call__(self, requests: Sequence[DiffusionRequest]) -> list[State | Exception]:
        self.entered.set()
        assert self._gate.wait(10)
        self.batches.append([request.request_id for request in requests])
        outcomes = Preparation(MaskedPipeline()).prepare(requests)
        bad = (request.request_id == "bad" for request in requests)
        return [ValueError("bad") if is_bad else outcome for is_bad, outcome in zip(bad, outcomes, strict=True)]


async def test_newcomers_that_wait_at_the_same_time_are_prepared_together(gate: threading.Event) -> None:
    prepare = Gated(gate)
    side = SideExecutor(MaskedPipeline(), prepare, threads=1)
    try:
        first = asyncio.create_task(side.prepare(request("first"), 1))
        assert await asyncio.to_thread(prepare.entered.wait, 10)
        names = ["a", "bad", "gone", *(f"more-{index}" for index in range(PREPARED_TOGETHER))]
        others = {name: asyncio.create_task(side.prepare(request(name), 2)) for name in names}
        await asyncio.sleep(0)  # they are in line
        others.pop("gone").cancel()
        await asyncio.sleep(0)
        gate.set()
        outcomes = await asyncio.gather(first, *others.values(), return_exceptions=True)
    finally:
        gate.set()
        side.close()
    assert prepare.batches[0] == ["first"]
    assert [name for batch in prepare.batches[1:] for name in batch] == list(others)
    assert [len(batch) for batch in prepare.batches] == [1, PREPARED_TOGETHER, 2]
    (fault,) = (outcome for outcome in outcomes if isinstance(outcome, BaseException))
    assert isinstance(fault, RequestError)
    assert fault.info.message == "preparing the request failed: ValueError: bad"
    assert [outcome.attempt for outcome in outcomes if not isinstance(outcome, BaseException)] == [1] + [2] * 9
