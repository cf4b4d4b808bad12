"""A worker that takes long at one thing: loading, encoding or denoising its first (warm-up) picture.

A program of the tests: `python -m tests.stack.slow_worker METHOD` takes the flags of `stepweave worker`. The time is
spent in one native call that holds torch's own threads, as a long step does.
"""

import functools
import sys
from typing import Any

import torch

from services import cli
from services.worker import service
from services.worker.loader import load_pipeline


def _take_time(method: str) -> None:
    print(f"{method} takes its time", file=sys.stderr, flush=True)  # noqa: T201 - the test waits for it
    size = 12_000  # a matrix product of tens of seconds on two cores
    torch.ones(size, size) @ torch.ones(size, size)
    _take_time(method)


def _load(slow: str, *arguments: Any) -> Any:
    if slow == "load":
        _take_time(slow)
    pipeline = load_pipeline(*arguments)
    setattr(pipeline, slow, lambda *_: _take_time(slow))
    return pipeline


if __name__ == "__main__":
    slow = sys.argv.pop(1)
    service.serve_worker = functools.partial(service.serve_worker, load=functools.partial(_load, slow))  # type: ignore[assignment]
    sys.argv.insert(1, "worker")
    cli.main()
