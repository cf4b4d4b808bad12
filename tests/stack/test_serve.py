"""`stepweave serve` with the demo checkpoint, asked by the official client, and ended."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import diffusers
import openai
import psutil
import pytest
from PIL import Image

from services.demo import DEMO_CHECKPOINT
from tests.stack import references
from tests.stack.processes import DEADLINE_S, ROOT, Stack, free_port, run, running, serving, stepweave, wait_until


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with serving(tmp_path_factory.mktemp("demo"), "--max-num-seqs", "8") as stack:
        yield stack


@pytest.fixture(scope="module")
def pipeline() -> diffusers.DiffusionPipeline:
    return references.load_demo()


PROMPTS = [
    "red apple",
    "a picture of a green frog",
    "house",
    "crying face",
    "blue heart",
    "rocket",
    "pizza",
    "dog face",
]
DEMO_TEXT_LENGTH = 20  # what it is served with, not the diffusers call's own default
TALL_OR_WIDE = {5: "64x96", 11: "96x64"}


def body(index: int) -> dict[str, Any]:
    """Sixteen different requests: prompts, seeds, steps, guidance, CFG on and off, negatives, sizes."""
    return {
        "prompt": PROMPTS[index % len(PROMPTS)],
        "size": TALL_OR_WIDE.get(index, "64x64"),
        "num_inference_steps": 4 + 3 * (index % 5),
        "guidance_scale": [4.0, 4.0, 1.0, 2.5][index % 4],
        "seed": 100 + index,
        "max_sequence_length": DEMO_TEXT_LENGTH,
        **({"negative_prompt": "red"} if index % 3 == 1 else {}),
    }


async def generate(client: openai.AsyncOpenAI, asked: dict[str, Any]) -> openai.types.ImagesResponse:
    extra = {key: value for key, value in asked.items() if key not in ("prompt", "size", "n")}
    return await client.images.generate(
        prompt=asked["prompt"], size=asked["size"], n=asked.get("n", 1), extra_body=extra, timeout=DEADLINE_S
    )


async def test_sixteen_at_once_each_equal_to_diffusers_alone(
    stack: Stack, pipeline: diffusers.DiffusionPipeline
) -> None:
    asked = [body(index) for index in range(16)]
    async with stack.client() as client:
        replies = await asyncio.gather(*(generate(client, each) for each in asked))
    for each, reply in zip(asked, replies, strict=True):
        assert reply.data is not None
        assert reply.data[0].b64_json is not None
        picture = references.decoded(reply.data[0].b64_json)
        assert references.largest_difference(picture, references.solo(pipeline, each)) <= 1, each
    assert max(len(line["requests"]) for line in step_lines(stack)) > 1, "nothing was batched"


async def test_n_pictures_are_those_of_n_seeds(stack: Stack) -> None:
    async with stack.client() as client:
        together = await generate(client, body(0) | {"n": 3, "seed": 5})
        alone = [await generate(client, body(0) | {"seed": 5 + index}) for index in range(3)]
    assert together.data is not None
    assert [picture.model_extra["seed"] for picture in together.data] == [5, 6, 7]
    for picture, single in zip(together.data, alone, strict=True):
        assert single.data is not None
        one, other = references.decoded(picture.b64_json or ""), references.decoded(single.data[0].b64_json or "")
        assert references.largest_difference(one, other) <= 1


async def test_the_seed_that_comes_back_makes_the_picture_again(stack: Stack) -> None:
    asked = body(1)
    del asked["seed"]
    async with stack.client() as client:
        first = await generate(client, asked)
        assert first.data is not None
        again = await generate(client, asked | {"seed": first.data[0].model_extra["seed"]})
    assert again.data is not None
    pictures = [references.decoded(reply.data[0].b64_json or "") for reply in (first, again)]
    assert references.largest_difference(*pictures) <= 1


def readme_example(words: str) -> str:
    """The README's Python block that holds `words`."""
    behind = (ROOT / "README.md").read_text().split("```python\n")[1:]
    return next(block for text in behind if words in (block := text.partition("```")[0]))


def test_the_readmes_examples_run_and_draw_the_same_picture(stack: Stack, tmp_path: Path) -> None:
    asking = readme_example("openai").replace("http://127.0.0.1:8000", stack.url)
    alone = readme_example("StableDiffusion3Pipeline").replace("services/demo/checkpoint", str(DEMO_CHECKPOINT))
    for program in (asking, alone + "picture.save('alone.png')"):
        subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, timeout=DEADLINE_S)
    with Image.open(tmp_path / "apple-0.png") as served, Image.open(tmp_path / "alone.png") as solo:
        assert references.largest_difference(served, solo) <= 1
    assert (tmp_path / "apple-1.png").exists()


async def test_a_client_that_leaves_takes_its_rows_along_at_the_next_boundary(stack: Stack) -> None:
    asked = body(0) | {"num_inference_steps": 200}
    name = "the-one-that-leaves"
    async with aiohttp.ClientSession(stack.url) as session:
        post = asyncio.ensure_future(
            session.post("/v1/images/generations", json=asked, headers={"X-Client-Request-Id": name})
        )
        request_id = await asyncio.to_thread(running_request, stack, name)
        post.cancel()
    await asyncio.to_thread(wait_until, lambda: index_of_release(stack, request_id) is not None, "it is released")
    released = index_of_release(stack, request_id)
    assert released is not None
    # Something else runs after it, so that there are later boundaries to look at.
    async with stack.client() as client:
        await generate(client, body(2))
    worker_lines = [line for line in stack.log_lines() if line["service"] == "worker"]
    later = [line for line in worker_lines[released + 1 :] if request_id in line.get("requests", ())]
    assert len(later) <= 1, "it ran past the boundary of the step that was running"
    assert stack.get(f"/v1/requests/{name}")[1]["data"][0]["status"] == "finished_aborted"


def running_request(stack: Stack, name: str) -> str:
    """The id of the call's only request, once it has run a few steps."""

    def steps() -> int:
        status, call = stack.get(f"/v1/requests/{name}")
        return call["data"][0]["step_index"] if status == 200 else 0

    wait_until(lambda: steps() >= 3, "it has run three steps")
    return stack.get(f"/v1/requests/{name}")[1]["data"][0]["request_id"]


def step_lines(stack: Stack) -> list[dict[str, Any]]:
    """The worker's log lines of steps in which something ran."""
    return [line for line in stack.log_lines() if line["event"] == "step" and line["requests"]]


def index_of_release(stack: Stack, request_id: str) -> int | None:
    """Where among the worker's lines it says that the request was released."""
    lines = [line for line in stack.log_lines() if line["service"] == "worker"]
    found = (i for i, line in enumerate(lines) if line["event"] == "released" and line["request_id"] == request_id)
    return next(found, None)


def test_generate_writes_a_picture_that_carries_how_it_was_made(stack: Stack, tmp_path: Path) -> None:
    output = tmp_path / "apple.png"
    done = run("generate", "red apple", "-o", str(output), "--seed", "3", "--url", stack.url)
    assert done.returncode == 0, done.stderr
    assert "seed 3" in done.stderr
    with Image.open(output) as picture:
        assert picture.size == (64, 64)
        assert "red apple" in str(picture.text)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--size", "63x64"], "64x64"),
        (["--steps", "0"], "num_inference_steps"),
        (["--model", "no-such"], "no-such"),
        (["--url", "127.0.0.1:8000"], "http://127.0.0.1:8000"),
        (["-o", "x.gif"], ".png"),
        (["-o", "no-such-folder/x.png"], "no-such-folder"),
    ],
)
def test_generate_says_what_is_wrong_in_one_line(
    stack: Stack, tmp_path: Path, arguments: list[str], words: str
) -> None:
    done = run("generate", "x", "-o", str(tmp_path / "x.png"), "--url", stack.url, *arguments)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_generate_takes_an_openai_base_url(stack: Stack, tmp_path: Path) -> None:
    done = run("generate", "red apple", "-o", str(tmp_path / "a.webp"), "--steps", "1", "--url", f"{stack.url}/v1/")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_generate_that_is_interrupted_fails_and_its_request_ends(
    stack: Stack, tmp_path: Path, number: signal.Signals
) -> None:
    before = len(step_lines(stack))
    command = stepweave("generate", "x", "-o", str(tmp_path / "x.png"), "--steps", "200", "--url", stack.url)
    with running(command, tmp_path / "generate.log") as process:
        wait_until(lambda: len(step_lines(stack)) > before, "it runs")
        process.send_signal(number)
        assert process.wait(timeout=10) == 130
    assert "interrupted" in (tmp_path / "generate.log").read_text()
    assert not (tmp_path / "x.png").exists()
    request_id = step_lines(stack)[-1]["requests"][0]
    wait_until(lambda: index_of_release(stack, request_id) is not None, "its request is released")


def test_a_port_in_use_is_said_at_once(stack: Stack) -> None:
    done = run("serve", "--port", str(stack.port))
    assert done.returncode == 1
    assert f"can't listen on 127.0.0.1:{stack.port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_is_no_model_is_said_in_words(tmp_path: Path) -> None:
    done = run("serve", "--port", str(free_port()), "--model", str(tmp_path))
    assert done.returncode == 1
    assert "model_index.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_settings_that_no_worker_can_run_with_are_refused_before_anything_starts() -> None:
    for command in ("serve", "worker"):
        done = run(command, "--max-num-seqs", "8", "--max-residents", "4")
        assert done.returncode == 1
        assert "--max-residents 4" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


async def test_a_child_that_dies_is_started_again_and_its_requests_are_drawn(
    tmp_path: Path, pipeline: diffusers.DiffusionPipeline
) -> None:
    with serving(tmp_path) as stack:
        asked = body(0) | {"num_inference_steps": 150}
        async with stack.client() as client:
            reply = asyncio.ensure_future(generate(client, asked))
            await asyncio.to_thread(wait_until, lambda: bool(step_lines(stack)), "it runs")
            worker = next(child for child in stack.children() if "worker" in child.cmdline())
            worker.kill()
            data = (await reply).data
        assert data is not None
        picture = references.decoded(data[0].b64_json or "")
        assert references.largest_difference(picture, references.solo(pipeline, asked)) <= 1


async def test_what_was_accepted_outlives_a_killed_scheduler(
    tmp_path: Path, pipeline: diffusers.DiffusionPipeline
) -> None:
    with serving(tmp_path, "--max-num-seqs", "1") as stack:  # so that most of them still wait
        asked = [body(index) | {"num_inference_steps": 30} for index in range(6)]
        async with stack.client() as client:
            replies = [asyncio.ensure_future(generate(client, each)) for each in asked]
            await asyncio.to_thread(wait_until, lambda: bool(step_lines(stack)), "one runs")
            next(child for child in stack.children() if "scheduler" in child.cmdline()).kill()
            for each, reply in zip(asked, await asyncio.gather(*replies), strict=True):
                assert reply.data is not None
                picture = references.decoded(reply.data[0].b64_json or "")
                assert references.largest_difference(picture, references.solo(pipeline, each)) <= 1


def test_sigterm_under_load_ends_everything_and_leaves_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as stack:
        children = stack.children()
        folders = {
            Path(argument[6:]).parent for child in children for argument in child.cmdline() if "ipc://" in argument
        }
        long_call = stepweave("generate", "x", "-o", str(tmp_path / "x.png"), "--steps", "200", "--url", stack.url)
        with running(long_call, tmp_path / "generate.log"):
            wait_until(lambda: bool(step_lines(stack)), "it runs")
            stack.process.send_signal(signal.SIGTERM)
            assert stack.process.wait(timeout=5) == 0
        assert children
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
        assert folders
        assert not any(folder.exists() for folder in folders)
        assert not any("killed" in line["event"] for line in stack.log_lines())


def test_a_signal_while_it_stops_for_a_fault_leaves_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    log = tmp_path / "serve.log"
    with running(stepweave("serve", "--port", str(free_port())), log) as process:
        supervisor = psutil.Process(process.pid)

        def by_service() -> dict[str, psutil.Process]:  # a child that was just forked still has the supervisor's own
            return {child.cmdline()[3]: child for child in supervisor.children() if len(child.cmdline()) > 3}

        wait_until(lambda: {"scheduler", "gateway", "worker"} <= by_service().keys(), "all are started")
        children = by_service()
        wait_until(lambda: bool(list(temporary.glob("*/scheduler"))), "the scheduler listens")
        children["worker"].suspend()  # so that stopping takes until it is killed
        children["gateway"].kill()
        wait_until(lambda: not children["scheduler"].is_running(), "it is stopping")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 1
    assert "killed by signal 9" in log.read_text()
    assert not any(child.is_running() for child in children.values())
    assert not list(temporary.iterdir())


def test_it_listens_on_ipv6_too_and_says_all_of_it_in_json(tmp_path: Path) -> None:
    with serving(tmp_path, "--host", "::1", host="[::1]") as stack:
        assert stack.get("/v1/models")[0] == 200
    # All that it and its children have written, to stdout and stderr alike.
    written = [json.loads(line) for line in stack.log.read_text().splitlines()]
    said = [line["event"] for line in written if line["service"] == "supervisor"]
    in_order = ["loading and drawing a warm-up picture", "Stepweave is ready", "stopping"]
    assert [event for event in said if event in in_order] == in_order


def test_children_do_not_outlive_a_killed_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # it can't clean up after itself
    with serving(tmp_path) as stack:
        children = stack.children()
        stack.process.kill()
        gone, alive = psutil.wait_procs(children, timeout=10)
        assert gone
        assert not alive
