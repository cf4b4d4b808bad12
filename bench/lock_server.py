"""The diffusers pipeline behind a lock: `python -m bench.lock_server CHECKPOINT PORT THREADS`.

Role: a program that `bench.compare` starts, and what many a home-made server is: one call at a time has the pipeline,
the others wait.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from common.process import run_service
from services.worker import prepare_environment


async def serve(checkpoint: Path, port: int, threads: int) -> None:
    """Serves until cancelled."""
    prepare_environment()  # before torch is imported, which reads it once
    from bench.whole_pictures import draw_all, load, reply

    pipeline = await asyncio.to_thread(load, checkpoint, threads)
    lock = asyncio.Lock()

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        async with lock:
            files = await asyncio.to_thread(draw_all, pipeline, [body])
        return web.json_response(reply(files[0]))

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/v1/images/generations", generate), web.get("/health", health)])
    runner: Any = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    run_service(serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
