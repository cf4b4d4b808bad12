"""The comparison's turns, without a model."""

import psutil
import pytest

from bench.client import Result
from bench.compare import Comparison
from bench.report import Summary, Window, summarize
from tests.bench.builders import MIXES, result

ANY_SERVER = (["http.server", "PORT", "--bind", "127.0.0.1"], "/")


async def test_only_the_system_whose_turn_it_is_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[tuple[str, int]] = []

    async def noted(_: Comparison, url: str, number: int) -> Summary:
        turns.append((url, number))
        assert len(psutil.Process().children(recursive=True)) == len(before) + 1
        results: list[Result] = [result(0, 0.0, 1.0)]
        return summarize(results, Window(0, 1), closed=True)

    before = psutil.Process().children(recursive=True)
    monkeypatch.setattr(Comparison, "_turn", noted)
    comparison = Comparison(["one", "other"], MIXES, clients=1, calls=1, seed=0)
    await comparison.run(2, {"one": ANY_SERVER, "other": ANY_SERVER})
    assert [number for _, number in turns] == [0, 0, 1, 1]
    assert {name: len(summaries) for name, summaries in comparison.summaries.items()} == {"one": 2, "other": 2}
    assert len(psutil.Process().children(recursive=True)) == len(before)
