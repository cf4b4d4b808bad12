"""A worker that writes down each of its steps: `python -m bench.recorded_worker SPEC` and flags of `stepweave worker`.

Role: a program that measurements start. SPEC is a JSON `Spec` of `bench.recording`. What it adds to a worker is one
line to a file at each step boundary, a few microseconds on the step thread, which the measurements include.
"""

import functools
import os
import sys
from typing import Any

import msgspec

from services.worker import prepare_environment

prepare_environment()  # before torch is imported, which reads it once

from bench.dummy import DummyPipeline  # noqa: E402
from bench.recording import Spec, Step  # noqa: E402
from services import cli  # noqa: E402
from services.worker import service  # noqa: E402
from services.worker.loader import load_pipeline  # noqa: E402
from services.worker.step_thread import Boundary, StepThread  # noqa: E402


def _step_thread(file: int, runner: Any, worker_id: str, on_boundary: Any, *rest: Any, **named: Any) -> StepThread:
    """The worker's own, with a recorder between it and the shell."""

    def record(boundary: Boundary) -> None:
        result = boundary.result
        step = Step(
            result.idle_s,
            sum(timing.seconds for timing in result.timings),
            {progress.request_id: progress.step_index for progress in result.progress},
        )
        os.write(file, msgspec.json.encode(step) + b"\n")
        on_boundary(boundary)

    return StepThread(runner, worker_id, record, *rest, **named)


def main() -> None:
    spec = msgspec.json.decode(sys.argv.pop(1), type=Spec)
    file = os.open(spec.record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def load(*arguments: Any) -> Any:
        return load_pipeline(*arguments) if spec.dummy is None else DummyPipeline(spec.dummy)

    service.StepThread = functools.partial(_step_thread, file)  # type: ignore[attr-defined]
    service.serve_worker = functools.partial(service.serve_worker, load=load)
    sys.argv.insert(1, "worker")
    cli.main()


if __name__ == "__main__":
    main()
