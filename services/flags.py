"""Flags made of the fields of a settings record.

Role: what typer is told about them. They have no defaults and no checks here: what is not given is looked for at the
other doors, and all that is found is checked in one way (`services/settings.py`).
"""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args

import typer
from msgspec import NODEFAULT
from msgspec.structs import FieldInfo, fields

from services.settings import COMMANDS, flag_name

METAVARS = {int: "INTEGER", float: "NUMBER", str: "TEXT"}


def takes_settings(command: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a function that takes them by keyword a flag for each setting of `command`: None where it is not given.

    They are text, except for switches.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        flags = [
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(field))
            for field in fields(COMMANDS[command])
        ]
        function.__signature__ = inspect.Signature([*own, *flags])  # which is all that typer looks at
        return function

    return decorate


def _option(field: FieldInfo) -> Any:
    kind, meta = get_args(field.type)
    default = "the demo checkpoint that comes with Stepweave" if field.default is NODEFAULT else field.default
    meaning = meta.description if default == "" else f"{meta.description}  [default: {default}]"
    if kind is bool:
        names = f"{flag_name(field.name, True)}/{flag_name(field.name, False)}"
        return Annotated[bool | None, typer.Option(names, help=meaning)]
    metavar = METAVARS.get(kind) or f"[{'|'.join(get_args(kind))}]"
    return Annotated[str | None, typer.Option(flag_name(field.name), help=meaning, metavar=metavar)]
