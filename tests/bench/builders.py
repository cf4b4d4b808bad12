"""Builders of calls and results: every field has a default, each test names what it is about."""

from typing import Any

from bench.client import Outcome, Result
from bench.workload import Call, Mix, Mixes, Shape

SHAPE = Shape(64, 64, 20)
MIXES = Mixes(Mix((SHAPE,), (1,)), Mix((4.0,), (1,)), Mix((1,), (1,)))


def call(number: int = 0, **changes: Any) -> Call:
    values = {"at_s": 0.0, "shape": SHAPE, "guidance_scale": 4.0, "n": 1, "seed": number, "prompt": "red apple"}
    return Call(number=number, **(values | changes))


def result(number: int, due_s: float, done_s: float, outcome: Outcome = "completed", **changes: Any) -> Result:
    values = {"sent_s": due_s, "pictures": 1 if outcome == "completed" else 0}
    return Result(call=call(number), due_s=due_s, done_s=done_s, outcome=outcome, **(values | changes))
