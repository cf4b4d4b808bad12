"""The wire contract keeps its shape: bytes once sent can be read for ever, and nothing else can."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import codec
from common import messages as m
from common.errors import ProtocolError
from tests.common import golden

TYPES = golden.message_types()


@pytest.mark.parametrize("name", golden.load())
def test_golden_bytes_still_decode_to_all_that_they_say(name: str) -> None:
    frame = golden.load()[name]
    kind = getattr(m, name.partition(".")[0])
    message = golden.decoder_of(kind).decode(frame)
    assert isinstance(message, kind)
    # What was dropped or renamed on the way in would be missing on the way out.
    assert codec.encode(message) == frame


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_every_message_as_it_is_now_has_golden_bytes(kind: type[m.Message]) -> None:
    assert codec.encode(golden.sample(kind)) in golden.load().values(), "run `python -m tests.common.golden`"


def test_the_sample_leaves_no_field_at_its_default() -> None:
    for kind in TYPES:
        message = golden.sample(kind)
        for field in msgspec.structs.fields(kind):
            assert getattr(message, field.name) != field.default, (kind, field.name)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_fields_of_a_later_version_are_ignored(kind: type[m.Message]) -> None:
    message = golden.sample(kind)
    later = msgspec.msgpack.encode(msgspec.msgpack.decode(codec.encode(message)) | {"field_of_a_later_version": [1]})
    assert golden.decoder_of(kind).decode(later) == message


def test_fields_with_defaults_come_last_and_may_be_absent() -> None:
    for kind in TYPES:
        required = [field.required for field in msgspec.structs.fields(kind)]
        assert required == sorted(required, reverse=True), kind


def test_every_message_has_exactly_one_receiver_but_for_the_two_that_greet() -> None:
    unions = [m.ToScheduler, m.ToWorker, m.ToGateway, m.DataToGateway, m.DataToWorker]
    for kind in TYPES:
        receivers = sum(kind in union.__args__ for union in unions)
        assert receivers == (2 if kind in (m.Welcome, m.Refused) else 1), kind


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "NoSuchMessage"}),
        msgspec.msgpack.encode({"type": "StepPlan"}),
        msgspec.msgpack.encode({"type": "WorkerHeartbeat", "worker_id": 3}),
        msgspec.msgpack.encode([1, 2]),
        b"\x91" * 100_000,
        codec.encode(m.Welcome("boot")),  # a message, but for another receiver
    ],
)
def test_anything_else_is_a_protocol_error(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.to_scheduler.decode(frame)


@given(kind=st.sampled_from(TYPES), position=st.integers(min_value=0), byte=st.integers(0, 255))
def test_a_damaged_frame_is_a_message_or_a_protocol_error(kind: type[m.Message], position: int, byte: int) -> None:
    frame = bytearray(codec.encode(golden.sample(kind)))
    frame[position % len(frame)] = byte
    try:
        message = golden.decoder_of(kind).decode(bytes(frame))
    except ProtocolError:
        return
    assert isinstance(message, m.Message)
