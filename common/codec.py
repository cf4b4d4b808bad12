"""Messages to bytes and back.

Role: MessagePack by msgspec, one decoder for each receiver's union. Frames that are no message of the union become
`ProtocolError`. Nothing but the declared types can come out of a frame (no pickle, no hooks).
"""

from typing import Any, Generic, TypeVar

import msgspec

from common import messages as m
from common.errors import ProtocolError

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()


def encode(message: m.Message) -> bytes:
    """The message's frame."""
    return _encoder.encode(message)


class Decoder(Generic[M]):
    """Decodes the messages of one receiver."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)

    def decode(self, frame: bytes | memoryview) -> M:
        """The message in `frame`. Raises `ProtocolError` if there is none of this receiver's."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not a message for this receiver: {error}") from error


to_scheduler: Decoder[m.ToScheduler] = Decoder(m.ToScheduler)
to_worker: Decoder[m.ToWorker] = Decoder(m.ToWorker)
to_gateway: Decoder[m.ToGateway] = Decoder(m.ToGateway)
data_to_gateway: Decoder[m.DataToGateway] = Decoder(m.DataToGateway)
data_to_worker: Decoder[m.DataToWorker] = Decoder(m.DataToWorker)
