"""What a recorded worker is told, and what it writes down of its steps.

Role: records and their files, for both sides: the program `bench.recorded_worker`, and measurements, which must not
import torch to start it.
"""

from pathlib import Path

import msgspec
from msgspec import Struct


class Durations(Struct, frozen=True):
    """Of a `bench.dummy` model's parts, in seconds."""

    step_s: float = 0.005
    encode_s: float = 0.0
    decode_s: float = 0.0


class Spec(Struct, frozen=True):
    """What to record, and of which model."""

    record: str  # the file; a line is a `Step`
    dummy: Durations | None = None  # instead of a real model


class Step(Struct, frozen=True):
    """One step boundary."""

    idle_s: float  # from the step before to this one, on the step thread; 0: it was the first, or nothing ran
    seconds: float  # of the step
    progress: dict[str, int]  # request ids and the step that each has reached


def command(spec: Spec) -> list[str]:
    """The arguments of `python -m` that start it, to be followed by flags of `stepweave worker`."""
    return ["bench.recorded_worker", msgspec.json.encode(spec).decode()]


def read_steps(record: Path) -> list[Step]:
    """What was written so far. A worker that was killed may have left half a line."""
    if not record.exists():
        return []
    lines = record.read_bytes().split(b"\n")
    return [msgspec.json.decode(line, type=Step) for line in lines[:-1]]
