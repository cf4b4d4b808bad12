"""The diffusers pipeline behind a lock: `python -m bench.lock_server CHECKPOINT PORT THREADS`.

Role: a program that `bench.compare` starts, and what many a home-made server is: one call at a time has the pipeline,
the others wait. Picture files are written beside it.
"""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

from common.process import run_service
from services.worker import prepare_environment


async def serve(checkpoint: Path, port: int, threads: int) -> None:
    """Serves until cancelled."""
    prepare_environment()  # before torch is imported, which reads it once
    from bench.whole_pictures import draw, load, reply

    # The lock. One thread for all calls: each thread that runs torch gets OpenMP threads of its own.
    alone = ThreadPoolExecutor(max_workers=1)
    loop = asyncio.get_running_loop()
    pipeline = await loop.run_in_executor(alone, load, checkpoint, threads)

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        (pictures,) = await loop.run_in_executor(alone, draw, pipeline, [body])
        return web.json_response(await asyncio.to_thread(reply, pictures))

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
        alone.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    run_service(serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
