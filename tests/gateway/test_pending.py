"""The registry alone, on a clock of the test's own: one outcome each, and a bounded memory of what ended."""

from collections.abc import Callable

import pytest

from common.errors import ErrorInfo
from common.messages import ImageOutput, RequestUpdate
from services.gateway import pending as module
from services.gateway.errors import ApiError
from services.gateway.pending import KEEP_ENDED_S, PendingCall, PendingCalls
from tests.builders import WORKER, request


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def calls(clock: Clock) -> PendingCalls:
    return PendingCalls(clock, lambda: 5e9)


def open_call(calls: PendingCalls, name: str = "c", n: int = 2, client_id: str = "") -> PendingCall:
    return calls.open(name, client_id, [request(f"{name}-{index}", seed=index) for index in range(n)])


def image(request_id: str, attempt: int = 1) -> ImageOutput:
    return ImageOutput(
        request_id=request_id,
        attempt=attempt,
        worker_id=WORKER,
        output_format="png",
        width=64,
        height=64,
        nbytes=3,
    )


PAYLOAD = memoryview(b"png")


async def test_call_is_settled_by_its_last_picture(calls: PendingCalls) -> None:
    call = open_call(calls)
    calls.on_image(image("c-1"), PAYLOAD)
    assert not call.settled.is_set()
    calls.on_image(image("c-0"), PAYLOAD)
    assert [picture.message.request_id for picture in await calls.wait(call, 1.0)] == ["c-0", "c-1"]


async def test_call_is_settled_by_its_first_error(calls: PendingCalls) -> None:
    call = open_call(calls)
    calls.on_update(RequestUpdate("c-0", "finished_error", attempt=1, error=ErrorInfo("non_finite", "NaN")))
    with pytest.raises(ApiError, match="NaN"):
        await calls.wait(call, 1.0)
    assert calls.close(call) == ("c-1",)


End = Callable[[PendingCalls], object]
ENDS: dict[str, End] = {
    "picture": lambda calls: calls.on_image(image("c-0"), PAYLOAD),
    "error": lambda calls: calls.on_update(RequestUpdate("c-0", "finished_error")),
    "abort": lambda calls: calls.on_update(RequestUpdate("c-0", "finished_aborted")),
}


@pytest.mark.parametrize("second", ENDS)
@pytest.mark.parametrize("first", ENDS)
def test_the_first_end_counts_and_the_second_is_counted(calls: PendingCalls, first: str, second: str) -> None:
    call = open_call(calls, n=1)
    ENDS[first](calls)
    ended, error, picture = call.requests[0].ended, call.error, call.requests[0].picture
    ENDS[second](calls)
    assert (call.requests[0].ended, call.error, call.requests[0].picture) == (ended, error, picture)
    assert calls.late_terminals == 1


@pytest.mark.parametrize("second", ENDS)
def test_the_answer_to_an_abort_from_here_is_no_late_end(calls: PendingCalls, second: str) -> None:
    calls.close(open_call(calls, n=1))  # its client has gone
    ENDS[second](calls)
    assert calls.late_terminals == (second != "abort")


def test_updates_after_the_picture_do_not_turn_it_back(calls: PendingCalls) -> None:
    call = open_call(calls)
    calls.on_image(image("c-0"), PAYLOAD)
    calls.on_update(RequestUpdate("c-0", "running", attempt=1, step_index=3))
    calls.on_update(RequestUpdate("c-0", "finished_completed", attempt=1))
    assert call.requests[0].status == "finished_completed"
    assert calls.late_terminals == 0


@pytest.mark.parametrize(("heard", "sent", "superseded"), [(2, 1, True), (2, 2, False), (0, 1, False), (1, 2, True)])
def test_picture_of_another_attempt_than_the_newest_supersedes_it(
    calls: PendingCalls, heard: int, sent: int, superseded: bool
) -> None:
    open_call(calls)
    calls.on_update(RequestUpdate("c-0", "running", attempt=heard))
    assert calls.on_image(image("c-0", sent), PAYLOAD).superseded is superseded


def test_closed_call_lets_go_of_prompt_and_picture(calls: PendingCalls) -> None:
    call = open_call(calls)
    calls.on_image(image("c-0"), PAYLOAD)
    calls.close(call)
    assert all(one.request is None and one.picture is None for one in call.requests)


def test_ended_calls_are_known_for_a_while(calls: PendingCalls, clock: Clock) -> None:
    call = open_call(calls, client_id="mine")
    calls.on_image(image("c-0"), PAYLOAD)
    calls.close(call)
    clock.now += KEEP_ENDED_S - 1
    calls.forget_ended()
    assert calls.find("c") is calls.find("mine") is call
    assert calls.on_image(image("c-0"), PAYLOAD).known
    clock.now += 2
    calls.forget_ended()
    assert calls.find("c") is None
    assert calls.find("mine") is None
    assert not calls.on_image(image("c-0"), PAYLOAD).known


def test_only_so_many_ended_calls_are_remembered(calls: PendingCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENDED", 3)
    for index in range(5):
        calls.close(open_call(calls, f"c{index}", client_id=f"mine{index}"))
    assert [calls.find(f"c{index}") is not None for index in range(5)] == [False, False, True, True, True]
    assert [calls.find(f"mine{index}") is not None for index in range(5)] == [False, False, True, True, True]
    assert calls.pending == 0


def test_a_client_name_that_is_used_again_means_the_newest_call(calls: PendingCalls, clock: Clock) -> None:
    old = open_call(calls, "old", client_id="mine")
    calls.close(old)
    clock.now += KEEP_ENDED_S / 2
    new = open_call(calls, "new", client_id="mine")
    assert calls.find("mine") is new
    clock.now += KEEP_ENDED_S / 2 + 1
    calls.forget_ended()
    assert calls.find("old") is None
    assert calls.find("mine") is new


def test_no_call_is_taken_once_it_shuts_down(calls: PendingCalls) -> None:
    call = open_call(calls)
    calls.shut_down(ApiError("bye", status=503))
    assert call.settled.is_set()
    with pytest.raises(ApiError, match="bye"):
        open_call(calls, "later")


def test_a_refusal_is_that_of_all_requests_of_its_call() -> None:
    ended: list[tuple[str, str]] = []
    calls = PendingCalls(on_ended=lambda call, request: ended.append((request.request_id, request.ended)))
    call = open_call(calls, n=3)
    error = ErrorInfo("queue_full", "the queue is full")
    calls.on_update(RequestUpdate("c-0", "finished_error", error=error))
    assert ended == [(f"c-{index}", "error") for index in range(3)]
    assert calls.close(call) == ()  # there is nothing to abort
    for index in (1, 2):
        calls.on_update(RequestUpdate(f"c-{index}", "finished_error", error=error))
    assert calls.late_terminals == 0
    calls.on_update(RequestUpdate("c-0", "finished_error", error=error))
    assert calls.late_terminals == 1
