"""The client behind `stepweave generate`: asks a gateway over HTTP and shows how far it is.

Role: a small client of the public API, which it uses as anybody else would. It knows no other part of Stepweave.
"""

import asyncio
import base64
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

POLL_S = 0.1
CONNECT_TIMEOUT_S = 5.0
FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".mp4": "mp4"}


class GenerateError(Exception):
    """The pictures could not be had; the text is for the person at the terminal."""


async def generate_to_files(url: str, request: dict[str, Any], output: Path) -> None:
    """Posts `request` to the images API at `url` and writes the pictures to `output` (numbered, if there are several).

    Raises `GenerateError` with the server's own words where it refuses or fails.
    """
    url = _server_of(url)
    request = request | {"output_format": _format_of(output), "response_format": "b64_json"}
    console = Console(stderr=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(base_url=url, timeout=timeout) as session:
            reply = await _post_with_progress(session, request, console)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise GenerateError(f"no server answers at {url} (start one with `stepweave serve`): {error}") from error
    except aiohttp.ClientError as error:
        raise GenerateError(f"the connection to {url} broke off: {error}") from error
    _write_pictures(reply, output, console)


def _server_of(url: str) -> str:
    """The server's address, also where an OpenAI client's `base_url` is given."""
    server = url.rstrip("/").removesuffix("/v1")
    parts = urlsplit(server)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path:
        raise GenerateError(f"{url!r} is no address of a server; it looks like http://127.0.0.1:8000")
    return server


def _format_of(output: Path) -> str:
    if output.suffix.lower() not in FORMATS:
        raise GenerateError(f"{output}: the file's ending must be one of {', '.join(FORMATS)}")
    folder = output.absolute().parent
    if not folder.is_dir():
        raise GenerateError(f"{output}: there is no folder {folder}")
    return FORMATS[output.suffix.lower()]


async def _post_with_progress(session: aiohttp.ClientSession, body: dict[str, Any], console: Console) -> dict[str, Any]:
    request_id = f"generate-{uuid.uuid4().hex}"
    post = asyncio.ensure_future(_post(session, body, request_id))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("sent", total=None)
            while not (await asyncio.wait([post], timeout=POLL_S))[0]:
                description, done, total = await _how_far(session, request_id)
                progress.update(bar, description=description, completed=done, total=total)
            return post.result()
    finally:
        post.cancel()  # a no-op once it is done; else the closed connection tells the server that nobody waits


async def _post(session: aiohttp.ClientSession, body: dict[str, Any], request_id: str) -> dict[str, Any]:
    async with session.post(
        "/v1/images/generations", json=body, headers={"X-Client-Request-Id": request_id}
    ) as response:
        try:
            reply: dict[str, Any] = await response.json(content_type=None)
        except ValueError as error:
            raise GenerateError(f"{response.url} answered {response.status} without JSON: is it Stepweave?") from error
        if response.status != 200:
            error_body = reply.get("error", {}) if isinstance(reply, dict) else {}
            message = error_body.get("message", "no reason given")
            param = f" ({error_body['param']})" if error_body.get("param") else ""
            raise GenerateError(f"the server answered {response.status}{param}: {message}")
        return reply


async def _how_far(session: aiohttp.ClientSession, request_id: str) -> tuple[str, int, int | None]:
    """What to show: description, steps done, steps in all (None while unknown)."""
    async with session.get(f"/v1/requests/{request_id}") as response:
        if response.status != 200:  # not seen there yet
            return "sent", 0, None
        call = await response.json()
    pictures = call["data"]
    total = sum(picture["total_steps"] for picture in pictures)
    statuses = {picture["status"] for picture in pictures}
    description = next((s for s in ("running", "decoding", "ready", "preparing") if s in statuses), "waiting")
    return description, sum(picture["step_index"] for picture in pictures), total or None


def _write_pictures(reply: dict[str, Any], output: Path, console: Console) -> None:
    for warning in reply.get("warnings") or []:
        console.print(f"[yellow]warning:[/] {warning}", highlight=False, soft_wrap=True)
    pictures = reply["data"]
    for index, picture in enumerate(pictures):
        path = output if len(pictures) == 1 else output.with_stem(f"{output.stem}-{index}")
        try:
            path.write_bytes(base64.b64decode(picture["b64_json"]))
        except OSError as error:
            raise GenerateError(f"{path} can't be written: {error.strerror}") from error
        console.print(f"{path}  {reply['size']}  seed {picture['seed']}", highlight=False)
