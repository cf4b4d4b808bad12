"""Settings written as the doors take them: flags, variables, files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from msgspec.structs import FieldInfo, fields

from services.settings import COMMANDS, SettingsFile, read_file, to_toml

FITTING: dict[str, Any] = {
    "max_residents": 40,
    "offload": "model",
}  # where a rule between fields would refuse just any value


def other_values(command: str) -> dict[str, Any]:
    """A value for each setting that is not its default, where there is another."""
    record = COMMANDS[command]
    return {field.name: FITTING.get(field.name, _other(field)) for field in fields(record)}


def _other(field: FieldInfo) -> Any:
    kind = get_args(field.type)[0]
    if get_origin(kind) is Literal:
        return get_args(kind)[-1]
    if kind is str:
        return 'a "b" \\ ü'
    return not field.default if kind is bool else kind(field.default * 1.25) + 1


def as_flags(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value if isinstance(value, bool) else str(value) for key, value in values.items()}


def as_variables(command: str, values: Mapping[str, Any]) -> dict[str, str]:
    return {f"STEPWEAVE_{command}_{key}".upper(): str(value) for key, value in values.items()}


def written(folder: Path, text: str, name: str = "its.toml") -> SettingsFile:
    path = folder / name
    path.write_text(text, "utf-8")
    return read_file(path, {})


def table(command: str, values: Mapping[str, Any]) -> str:
    return "\n".join([f"[{command}]", *(f"{key} = {to_toml(value)}" for key, value in values.items())])
