"""Preparation: what is cut is said, what is not supported is refused, and tokenizers have one user at a time."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from common.errors import RequestError
from common.params import LoraSpec
from services.worker.pipelines.protocol import StepPipeline
from services.worker.preparation import Preparation
from tests.worker.driving import prepared, request

LONG = "apple " * 300


def test_a_prompt_that_fits_has_no_warning(pipeline: StepPipeline) -> None:
    warnings = prepared(pipeline, request("r", negative_prompt="blurry")).warnings
    assert not [warning for warning in warnings if "too long" in warning]


@pytest.mark.parametrize(
    ("name", "encoders"),
    [
        ("sd1", ["the CLIP text encoder, which takes 24"]),
        ("sd3", ["the first CLIP text encoder, which takes 24", "the second CLIP text encoder, which takes 24"]),
        (
            "sd3-t5",
            [
                "the first CLIP text encoder, which takes 24",
                "the second CLIP text encoder, which takes 24",
                "the T5 text encoder, which takes 256",
            ],
        ),
    ],
)
def test_every_encoder_that_cuts_a_prompt_is_named(
    tiny: Callable[[str], StepPipeline], name: str, encoders: list[str]
) -> None:
    warnings = prepared(tiny(name), request("r", prompt=LONG)).warnings
    assert [any(encoder in warning for warning in warnings) for encoder in encoders] == [True] * len(encoders)
    assert len(warnings) == len(encoders)


def test_the_number_of_dropped_tokens_is_said(tiny: Callable[[str], StepPipeline]) -> None:
    assert prepared(tiny("sd1"), request("r", prompt=LONG)).warnings == (
        "prompt is too long for the CLIP text encoder, which takes 24 tokens: the last 278 were dropped",
    )


def test_a_negative_prompt_that_is_cut_is_named_where_it_is_used(tiny: Callable[[str], StepPipeline]) -> None:
    used = prepared(tiny("sd1"), request("r", negative_prompt=LONG)).warnings
    assert [warning.split()[0] for warning in used] == ["negative_prompt"]
    assert prepared(tiny("sd1"), request("r", negative_prompt=LONG, guidance_scale=1.0)).warnings == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora", (LoraSpec("style"),)),
        ("num_frames", 5),
        ("true_cfg_scale", 3.0),
        ("strength", 0.5),
    ],
)
def test_what_a_family_would_ignore_is_refused_by_name(pipeline: StepPipeline, field: str, value: Any) -> None:
    refused: tuple[str, str | None] | None = None
    try:
        prepared(pipeline, request("r", **{field: value}))
    except RequestError as error:
        refused = (error.info.code, error.info.param)
    heeded = field in pipeline.profile("m", 50).accepts
    assert refused == (None if heeded else ("invalid_request", field))


def test_requests_share_no_solver_and_no_generator(pipeline: StepPipeline) -> None:
    one, other = (prepared(pipeline, request(request_id)) for request_id in "ab")
    assert one.scheduler is not other.scheduler
    assert one.generator is not other.generator
    assert torch.equal(one.latents, other.latents)


@pytest.mark.parametrize("name", ["sd1", "sd3-t5"])
def test_two_threads_that_prepare_do_not_disturb_each_other(
    tiny: Callable[[str], StepPipeline], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pipeline = tiny(name)
    prompts = ["frog", LONG]
    with torch.inference_mode():
        expected = [prepared(pipeline, request("r", prompt=prompt)).cond.prompt_embeds for prompt in prompts]
    preparation = Preparation(pipeline, cache_bytes=0)
    users: list[int] = []  # threads inside a tokenizer
    wrong: list[str] = []
    call = PreTrainedTokenizerBase.__call__

    def watched(*arguments: Any, **keywords: Any) -> Any:
        if users:
            wrong.append("two threads in a tokenizer at once")
        users.append(threading.get_ident())
        try:
            threading.Event().wait(1e-4)  # an invitation to the other thread
            return call(*arguments, **keywords)
        finally:
            users.remove(threading.get_ident())

    monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", watched)

    def encode(index: int) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode():
            for _ in range(40):
                embeds = preparation.prepare_one(request("r", prompt=prompts[index])).cond.prompt_embeds
                if embeds.shape != expected[index].shape or not torch.allclose(embeds, expected[index], atol=1e-4):
                    wrong.append(f"{prompts[index][:10]}: other embeddings")

    threads = [threading.Thread(target=encode, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
