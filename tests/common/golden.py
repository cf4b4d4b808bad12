"""Golden bytes of every message: `python -m tests.common.golden` adds entries for what has none yet.

Entries are never changed: they are what peers of an earlier version send. A field added later gets an entry of its own.
"""

import json
from pathlib import Path
from typing import Any

from msgspec import inspect

from common import codec
from common import messages as m

GOLDEN = Path(__file__).with_name("golden.json")
UNIONS: dict[str, codec.Decoder[Any]] = {
    "to_scheduler": codec.to_scheduler,
    "to_worker": codec.to_worker,
    "to_gateway": codec.to_gateway,
    "data_to_gateway": codec.data_to_gateway,
    "data_to_worker": codec.data_to_worker,
}


def message_types() -> list[type[m.Message]]:
    return m.Message.__subclasses__()


def decoder_of(kind: type[m.Message]) -> codec.Decoder[Any]:
    union = {
        "to_scheduler": m.ToScheduler,
        "to_worker": m.ToWorker,
        "to_gateway": m.ToGateway,
        "data_to_gateway": m.DataToGateway,
        "data_to_worker": m.DataToWorker,
    }
    return next(UNIONS[name] for name, members in union.items() if kind in members.__args__)


def sample(kind: type[Any]) -> Any:
    """An instance with a value other than the default in every field, the same at every call."""
    return _value(inspect.type_info(kind), "")


def _value(info: inspect.Type, name: str) -> Any:
    match info:
        case inspect.StructType(cls=cls, fields=fields):
            return cls(**{field.name: _value(field.type, field.name) for field in fields})
        case inspect.UnionType(types=types):
            return _value(next(each for each in types if not isinstance(each, inspect.NoneType)), name)
        case inspect.LiteralType(values=values):
            return values[-1]  # defaults are first values, where a literal has one
        case inspect.VarTupleType(item_type=item):
            return (_value(item, name), _value(item, name))
        case inspect.TupleType(item_types=items):
            return tuple(_value(item, name) for item in items)
        case inspect.StrType():
            return f"{name} ü 字"
        case inspect.BoolType():
            return name != "step_execution"
        case inspect.IntType():
            return 7 + len(name)
        case inspect.FloatType():
            return 0.5 + len(name)
    raise NotImplementedError(info)


def load() -> dict[str, bytes]:
    return {name: bytes.fromhex(text) for name, text in json.loads(GOLDEN.read_text()).items()}


def main() -> None:
    entries = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    for kind in message_types():
        frame = codec.encode(sample(kind))
        versions = [name for name in entries if name.partition(".")[0] == kind.__name__]
        if frame.hex() not in (entries[name] for name in versions):
            entries[f"{kind.__name__}.{len(versions) + 1}"] = frame.hex()
    GOLDEN.write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    main()
