"""Request mode through real processes: a pipeline that can't be run step by step, asked by the official client."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import openai

from tests.checkpoints.stable_diffusion_xl import save_sdxl
from tests.stack import references
from tests.stack.fleet import Fleet, post_all
from tests.stack.processes import run, wait_until
from tests.worker.driving import LONG

COMMON = {"prompt": "frog", "size": "32x32", "guidance_scale": 5.0, "num_inference_steps": 6, "seed": 1}


def calls_of(fleet: Fleet, name: str) -> list[list[str]]:
    """The requests of each call that a worker has begun."""
    return [line["requests"] for line in fleet.lines_of(name) if line["event"] == "calling the pipeline"]


async def generate(client: openai.AsyncOpenAI, asked: dict[str, Any], n: int = 1) -> list[Any]:
    extra = {name: value for name, value in asked.items() if name not in ("prompt", "size")}
    reply = await client.images.generate(prompt=asked["prompt"], size=asked["size"], n=n, extra_body=extra)
    assert reply.data is not None
    return reply.data


async def test_pictures_are_those_of_diffusers_alone_and_those_of_a_killed_worker_are_drawn_by_another(
    tmp_path: Path,
) -> None:
    folder = save_sdxl(tmp_path / "sdxl")
    with contextlib.ExitStack() as stack:
        fleet = Fleet(tmp_path, stack)
        fleet.start_worker("one", "--model", str(folder), "--no-step-execution")
        await asyncio.to_thread(fleet.wait_for_workers)
        async with fleet.gateway.client() as client:
            pictures = await generate(client, COMMON, n=3)
        assert [len(call) for call in calls_of(fleet, "one")] == [3], "one call of the client is one of the pipeline"
        crowd = [
            COMMON | {"prompt": LONG, "seed": 12},
            COMMON | {"num_inference_steps": 4, "seed": 13},
            COMMON | {"negative_prompt": "blurry", "seed": 14},
            COMMON | {"size": "48x32", "seed": 15},
        ]
        replies = await post_all(fleet, crowd)

        fleet.start_worker("two", "--model", str(folder), "--no-step-execution")
        await asyncio.to_thread(fleet.wait_for_workers)
        long = COMMON | {"num_inference_steps": 200, "seed": 16}
        before = {name: len(calls_of(fleet, name)) for name in fleet.workers}
        posted = asyncio.ensure_future(post_all(fleet, [long]))

        def at_work() -> list[str]:
            return [name for name in before if len(calls_of(fleet, name)) > before[name]]

        await asyncio.to_thread(wait_until, lambda: bool(at_work()), "one calls its pipeline")
        (killed,) = at_work()
        fleet.kill(killed)
        (reply,) = await posted
        (other,) = fleet.workers
        assert len(calls_of(fleet, other)) == before[other] + 1

    pipeline = references.load(folder)
    for index, picture in enumerate(pictures):
        drawn = references.decoded(picture.b64_json)
        assert references.largest_difference(drawn, references.solo(pipeline, COMMON | {"seed": 1 + index})) <= 1
    for asked, answer in zip([*crowd, long], [*replies, reply], strict=True):
        references.assert_is_solo(pipeline, asked, answer)


def test_a_model_that_can_not_be_served_so_ends_the_worker_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "DDPMPipeline"}))
    done = run("worker", "--model", str(tmp_path), "--no-step-execution")
    assert done.returncode == 1
    assert "a DDPMPipeline can't be served by its whole call: it takes no prompt" in done.stderr
    assert "Traceback" not in done.stderr
