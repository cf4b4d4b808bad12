"""The policies, on candidates made by hand."""

from common.messages import WorkerLimits
from services.scheduler.key import RequestShape
from services.scheduler.policy import Candidate, fifo
from tests.scheduler.test_key import shape

SMALL = shape({"height": 64})
LARGE = shape({"height": 128})
ONE_ROW = shape({"height": 64, "guidance_scale": 1.0}, mixes=("guidance", "cfg"))
TWO_ROWS = shape({"height": 64, "guidance_scale": 4.0}, mixes=("guidance", "cfg"))


def candidate(name: str, kind: RequestShape = SMALL, *, ready: bool = True, started: bool = False) -> Candidate:
    return Candidate(name, kind, 4, ready, started)


def group(*candidates: Candidate, **limits: int) -> tuple[str, ...]:
    groups = fifo(candidates, WorkerLimits(**{"max_num_seqs": 8, "max_residents": 16} | limits))
    assert len(groups) <= 1
    return groups[0] if groups else ()


def test_nobody_makes_no_group() -> None:
    assert fifo((), WorkerLimits(max_num_seqs=8, max_residents=16)) == ()


def test_equal_keys_run_together_in_order() -> None:
    assert group(candidate("a"), candidate("b"), candidate("c")) == ("a", "b", "c")


def test_an_incompatible_head_blocks_those_behind_it() -> None:
    running = candidate("a", started=True)
    assert group(running, candidate("b", LARGE), candidate("c")) == ("a",)


def test_a_ready_follower_does_not_overtake_a_head_that_is_preparing() -> None:
    running = candidate("a", started=True)
    assert group(running, candidate("b", ready=False), candidate("c")) == ("a",)
    assert group(candidate("b", ready=False), candidate("c")) == ()


def test_an_incompatible_head_runs_when_those_before_it_are_gone() -> None:
    assert group(candidate("b", LARGE), candidate("c")) == ("b",)


def test_what_runs_goes_on_even_if_it_is_not_first() -> None:
    assert group(candidate("a", LARGE), candidate("b", started=True)) == ("b",)


def test_at_most_max_num_seqs_run() -> None:
    assert group(candidate("a"), candidate("b"), candidate("c"), max_num_seqs=2) == ("a", "b")


def test_zero_is_no_limit() -> None:
    assert len(group(*(candidate(str(i)) for i in range(40)), max_num_seqs=0)) == 40


def test_rows_are_counted_where_they_are_limited() -> None:
    assert group(candidate("a", TWO_ROWS), candidate("b", ONE_ROW), candidate("c", ONE_ROW), max_rows=3) == ("a", "b")


def test_tokens_are_counted_where_they_are_limited() -> None:
    assert group(candidate("a"), candidate("b"), candidate("c"), max_tokens=2 * SMALL.tokens) == ("a", "b")


def test_a_request_over_a_limit_runs_alone() -> None:
    assert group(candidate("a", LARGE), candidate("b", LARGE), max_tokens=1, max_rows=1) == ("a",)
