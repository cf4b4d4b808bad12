"""`stepweave config`: what is in force and whence, for people, for programs, and as a file to start from.

Role: text and tables from `services.settings`. It decides nothing and reads nothing.
"""

from collections.abc import Sequence
from typing import get_args

from msgspec.structs import fields
from rich.console import Console
from rich.table import Column, Table

from services.settings import COMMANDS, Settings, to_toml


def print_settings(commands: Sequence[Settings], console: Console) -> None:
    """A table for each command on a terminal; elsewhere a line for each setting."""
    if not console.is_terminal:
        console.out(_lines(commands), highlight=False)
        return
    for command in commands:
        title = f"stepweave {command.command}"
        table = Table("setting", Column("value", overflow="fold"), Column("whence", overflow="fold"), title=title)
        for setting in command.settings:
            style = "dim" if setting.door == "default" else None
            table.add_row(setting.key, to_toml(setting.value), setting.place, style=style)
        console.print(table, markup=False, highlight=False)


def _lines(commands: Sequence[Settings]) -> str:
    return "\n".join(
        f"{command.command}.{setting.key} = {to_toml(setting.value)}  # {setting.place}"
        for command in commands
        for setting in command.settings
    )


def as_file(commands: Sequence[Settings]) -> str:
    """A settings file that gives what is in force. Defaults are comments in it, so it shows all that can be set."""
    lines = []
    for command in commands:
        meanings = {field.name: get_args(field.type)[1].description for field in fields(COMMANDS[command.command])}
        lines += [f"[{command.command}]"]
        for setting in command.settings:
            line = f"{setting.key} = {to_toml(setting.value)}"
            lines += [f"# {meanings[setting.key]}"]
            lines += [f"# {line}"] if setting.door == "default" else [f"{line}  # {setting.place}"]
        lines += [""]
    return "\n".join(lines)
