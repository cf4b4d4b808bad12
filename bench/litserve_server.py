"""Static batching of whole requests: `python -m bench.litserve_server CHECKPOINT PORT THREADS BATCH TIMEOUT`.

Role: a program that `bench.compare` starts. LitServe collects up to BATCH calls, or what came within TIMEOUT seconds of
the first, and hands them over as one batch, which runs to its end before the next.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import litserve

from common.process import LIFELINE_FD_VARIABLE
from services.worker import prepare_environment


class Pictures(litserve.LitAPI):  # type: ignore[misc]
    """The diffusers pipeline, batch by batch."""

    def __init__(self, checkpoint: Path, threads: int, batch_size: int, batch_timeout: float) -> None:
        super().__init__(max_batch_size=batch_size, batch_timeout=batch_timeout, api_path="/v1/images/generations")
        self._checkpoint = checkpoint
        self._threads = threads

    def setup(self, device: str) -> None:
        prepare_environment()  # before torch is imported, which reads it once
        from bench.whole_pictures import load

        self._pipeline = load(self._checkpoint, self._threads)

    def predict(self, x: list[dict[str, Any]]) -> list[list[Any]]:
        from bench.whole_pictures import draw

        return draw(self._pipeline, x)

    def encode_response(self, output: list[Any]) -> dict[str, Any]:
        from bench.whole_pictures import reply

        return reply(output)


def _interrupt(*_: object) -> NoReturn:
    # LitServe ends its processes in order at Ctrl-C only; SIGTERM would leave them behind.
    raise KeyboardInterrupt


def _end_with_parent() -> None:
    """Ends this process when the one that started it is gone."""
    lifeline = os.environ.get(LIFELINE_FD_VARIABLE)
    if lifeline is not None:
        os.read(int(lifeline), 1)  # nothing is ever written: it returns when the other end is gone
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    checkpoint, port, threads, batch_size, batch_timeout = sys.argv[1:]
    signal.signal(signal.SIGTERM, _interrupt)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    api = Pictures(Path(checkpoint), int(threads), int(batch_size), float(batch_timeout))
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=1, timeout=False)
    server.run(host="127.0.0.1", port=int(port), num_api_servers=1, log_level="warning", generate_client_file=False)


if __name__ == "__main__":
    main()
