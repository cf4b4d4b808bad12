"""The lifecycle table."""

import itertools
from typing import get_args

import pytest

from common.messages import RequestStatus
from services.scheduler.request import (
    FINISHED,
    LIVE,
    ON_WORKER,
    STORY_LENGTH,
    InvalidTransition,
    Request,
    render_lifecycle,
    transition,
)
from tests import builders

LEGAL = {
    ("waiting", "preparing"),
    ("preparing", "ready"),
    ("ready", "running"),
    ("running", "preempted"),
    ("preempted", "running"),
    ("running", "decoding"),
    ("decoding", "finished_completed"),
    *((status, "waiting") for status in ("preparing", "ready", "running", "preempted", "decoding")),
    *(
        (status, end)
        for status in ("waiting", "preparing", "ready", "running", "preempted", "decoding")
        for end in ("finished_aborted", "finished_error")
    ),
}
PAIRS = list(itertools.product(get_args(RequestStatus), repeat=2))


def record(status: RequestStatus = "waiting") -> Request:
    return Request(builders.request("r1"), 1, status=status)


@pytest.mark.parametrize(("source", "target"), [pair for pair in PAIRS if pair in LEGAL])
def test_a_legal_move_is_made(source: RequestStatus, target: RequestStatus) -> None:
    request = record(source)
    transition(request, target, 1.5, "because")
    assert request.status == target
    assert request.story[-1] == (1.5, source, target, "because")


@pytest.mark.parametrize(("source", "target"), [pair for pair in PAIRS if pair not in LEGAL])
def test_an_illegal_move_raises_and_changes_nothing(source: RequestStatus, target: RequestStatus) -> None:
    request = record(source)
    with pytest.raises(InvalidTransition):
        transition(request, target, 1.5, "because")
    assert request.status == source
    assert not request.story


def test_every_status_is_live_or_finished() -> None:
    assert {*LIVE, *FINISHED} == set(get_args(RequestStatus))
    assert set(ON_WORKER) == set(LIVE) - {"waiting"}


def test_an_invalid_transition_tells_the_story_of_the_request() -> None:
    request = record()
    transition(request, "preparing", 0.25, "dispatched to worker-a")
    transition(request, "waiting", 5.5, "worker-a was silent")
    with pytest.raises(InvalidTransition) as raised:
        transition(request, "decoding", 6.0, "all steps done")
    told = str(raised.value)
    assert "waiting -> decoding (all steps done)" in told
    assert "0.250 s: waiting -> preparing (dispatched to worker-a)" in told
    assert "5.500 s: preparing -> waiting (worker-a was silent)" in told
    assert "r1" in told


def test_the_story_is_of_the_last_moves_only() -> None:
    request = record("running")
    for number in range(STORY_LENGTH):
        transition(request, "preempted", number, "left out")
        transition(request, "running", number, "in again")
    assert len(request.story) == STORY_LENGTH
    assert request.story[0].now == STORY_LENGTH / 2


def test_the_diagram_has_an_arrow_for_every_legal_move_and_no_other() -> None:
    lines = render_lifecycle().splitlines()
    assert lines[0] == "stateDiagram-v2"
    arrows = {tuple(line.split(":")[0].split(" --> ")) for line in map(str.strip, lines[1:]) if "[*]" not in line}
    assert arrows == LEGAL
    assert "    [*] --> waiting: submitted" in lines
    assert "    finished_completed --> [*]" in lines
