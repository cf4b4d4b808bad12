"""From flags, variables, a settings file and defaults to one frozen record.

Role: one setting has one name at each door: the field `max_queue` of `common.config` is the flag `--max-queue`, the key
`max_queue` in its command's table of the file, and the variable `STEPWEAVE_<COMMAND>_MAX_QUEUE`. A flag goes before a
variable, that before the file, that before the default; whichever is in force is checked in the same way. What can't be
used raises `ConfigError` with where it stands and what would be right. It knows neither typer nor a terminal.
"""

import difflib
import json
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Struct
from msgspec.structs import FieldInfo, fields

from common.config import GatewayConfig, SchedulerConfig, ServeConfig, WorkerConfig, broken_rule
from common.errors import ConfigError
from common.process import LIFELINE_FD_VARIABLE
from services.demo import DEMO_CHECKPOINT, DEMO_MODEL_NAME

COMMANDS: dict[str, type[Struct]] = {
    "serve": ServeConfig,
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "worker": WorkerConfig,
}
KEYS = {command: tuple(field.name for field in fields(record)) for command, record in COMMANDS.items()}
DEMO = {"model": str(DEMO_CHECKPOINT), "served_model_name": DEMO_MODEL_NAME}

DEFAULT_FILE = Path("stepweave.toml")  # read if it is in the working directory
PREFIX = "STEPWEAVE_"
FILE_VARIABLE = "STEPWEAVE_CONFIG"
NO_SETTINGS = {FILE_VARIABLE, LIFELINE_FD_VARIABLE, "STEPWEAVE_EXAMPLES"}  # the last is read by the tests
VARIABLES = {f"{PREFIX}{command}_{key}".upper(): (command, key) for command in COMMANDS for key in KEYS[command]}

# Kubernetes tells every pod of a Service named `stepweave-gateway` by variables such as STEPWEAVE_GATEWAY_SERVICE_HOST
# and STEPWEAVE_GATEWAY_PORT=tcp://10.0.0.7:8000.
_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$")
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")

_KINDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}

Door = Literal["flag", "variable", "file", "default"]


class Setting(Struct, frozen=True):
    """One value in force, and whence it is."""

    key: str
    value: Any  # as the door gave it, or of the field's type
    door: Door
    place: str  # "--port", "STEPWEAVE_SERVE_PORT", "stepweave.toml:7", "default"

    def __str__(self) -> str:
        """As the one who wrote it knows it."""
        match self.door:
            case "flag":
                return self.place if isinstance(self.value, bool) else f"{self.place} {shlex.quote(str(self.value))}"
            case "variable":
                return f"{self.place}={self.value}"
            case "file":
                return f"{self.place}: {self.key} = {to_toml(self.value)}"
            case "default":
                return f"{self.key} = {to_toml(self.value)} (default)"


class SettingsFile(NamedTuple):
    """What a settings file holds."""

    name: str
    tables: dict[str, dict[str, Any]]
    lines: dict[tuple[str, str], int]  # of each table and key


NO_FILE = SettingsFile("", {}, {})


class Settings(Struct, frozen=True):
    """One command's settings in force."""

    command: str
    config: Any  # the command's record of `common.config`
    settings: tuple[Setting, ...]  # in the order of its fields, with values of their types
    unread: tuple[str, ...]  # tables and variables that are there, but for other commands


def read_file(flag: Path | None, environ: Mapping[str, str]) -> SettingsFile:
    """The file that the flag names, or else the variable, or else the default one if it is there.

    Raises `ConfigError` if a file that was named can't be read, and if one has unknown tables or keys.
    """
    variable = environ.get(FILE_VARIABLE)
    path = flag or (Path(variable) if variable else DEFAULT_FILE)
    whence = " (--config)" if flag else f" ({FILE_VARIABLE})" if variable else ""
    if not whence and not path.exists():
        return NO_FILE
    try:
        text = path.read_text("utf-8-sig")  # some editors begin UTF-8 with a mark
        document = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"can't read the settings file {path}{whence}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: a settings file must be UTF-8: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error
    file = SettingsFile(str(path), document, _lines(text))
    _check_names(file)
    return file


def _lines(text: str) -> dict[tuple[str, str], int]:
    """The line on which each table (with the key "") and key is complete. `tomllib` reads a text and says no lines."""
    found: dict[tuple[str, str], int] = {}
    lines = text.split("\n")
    for number in range(1, len(lines) + 1):
        try:
            document = tomllib.loads("\n".join(lines[:number]))
        except tomllib.TOMLDecodeError:  # within a value of several lines
            continue
        for table, content in document.items():
            for key in ("", *content) if isinstance(content, dict) else ("",):
                found.setdefault((table, key), number)
    return found


def _check_names(file: SettingsFile) -> None:
    """Raises `ConfigError` for the first table or key that no command has."""
    for table, content in file.tables.items():
        here = f"{file.name}:{file.lines[table, '']}"
        if not isinstance(content, dict) and table not in COMMANDS:
            raise ConfigError(f"{here}: {table} stands in no table; the tables are {_tables(COMMANDS)}")
        if table not in COMMANDS:
            raise ConfigError(f"{here}: unknown table [{table}]; {_nearest(table, COMMANDS)}")
        if not isinstance(content, dict):
            raise ConfigError(f"{here}: {table} must be a table, [{table}] on a line of its own")
        for key in content:
            if key not in KEYS[table]:
                owners = [command for command in COMMANDS if key in KEYS[command]]
                hint = f"it belongs to {_tables(owners)}" if owners else _nearest(key, KEYS[table])
                raise ConfigError(f"{file.name}:{file.lines[table, key]}: unknown key {key} in [{table}]; {hint}")


def _tables(commands: Iterable[str]) -> str:
    return ", ".join(f"[{command}]" for command in commands)


def _nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"


def resolve(command: str, flags: Mapping[str, Any], environ: Mapping[str, str], file: SettingsFile) -> Settings:
    """The settings of `command`. `flags` holds what was given, by key: text, or a boolean.

    Raises `ConfigError` for an unknown variable, and for a value in force that can't be used.
    """
    variables, foreign = _variables(command, environ)
    given = _from_file(command, file) | variables | _from_flags(flags)
    settings = {}
    for field in fields(COMMANDS[command]):
        setting = given.get(field.name) or _default(field, demo="model" not in given)
        settings[field.name] = _typed(setting, field)
    config = COMMANDS[command](**{key: setting.value for key, setting in settings.items()})
    rule = broken_rule(config)
    if rule is not None:
        raise ConfigError(f"{rule.text}; there is {', '.join(str(settings[key]) for key in rule.fields)}")
    unread = [f"[{table}]" for table in file.tables if table != command] + foreign
    return Settings(command, config, tuple(settings.values()), tuple(unread))


def _from_file(command: str, file: SettingsFile) -> dict[str, Setting]:
    return {
        key: Setting(key, value, "file", f"{file.name}:{file.lines[command, key]}")
        for key, value in file.tables.get(command, {}).items()
    }


def _variables(command: str, environ: Mapping[str, str]) -> tuple[dict[str, Setting], list[str]]:
    """What is set for `command`, and the names of what is set for others. Raises `ConfigError` for unknown names."""
    own, foreign = {}, []
    for name, value in sorted(environ.items()):
        if not name.startswith(PREFIX) or name in NO_SETTINGS or _is_service_link(name, value):
            continue
        if name not in VARIABLES:
            raise ConfigError(f"unknown variable {name}; {_nearest(name, VARIABLES, cutoff=0)}")
        owner, key = VARIABLES[name]
        if value == "":  # not set, as far as whoever passes on `${PORT:-}` can say it
            continue
        if owner == command:
            own[key] = Setting(key, value, "variable", name)
        else:
            foreign.append(name)
    return own, foreign


def _is_service_link(name: str, value: str) -> bool:
    by_value = name.endswith("_PORT") and _SERVICE_LINK_VALUE.match(value) is not None
    return by_value or _SERVICE_LINK.search(name) is not None


def _from_flags(flags: Mapping[str, Any]) -> dict[str, Setting]:
    return {key: Setting(key, value, "flag", flag_name(key, value)) for key, value in flags.items()}


def _default(field: FieldInfo, demo: bool) -> Setting:
    """The field's own default; without a model it is the demo checkpoint's."""
    value = DEMO.get(field.name, field.default) if demo else field.default
    return Setting(field.name, value, "default", "default")


def _typed(setting: Setting, field: FieldInfo) -> Setting:
    try:
        # A file has types of its own; flags and variables are text.
        value = msgspec.convert(setting.value, field.type, strict=setting.door == "file")
    except msgspec.ValidationError as error:
        raise ConfigError(f"{setting}: {setting.key} must be {expected(field)}") from error
    return msgspec.structs.replace(setting, value=value)


def expected(field: FieldInfo) -> str:
    """What a field takes, in words."""
    kind, meta = get_args(field.type)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    bounds = {"at least": meta.ge, "more than": meta.gt, "at most": meta.le}
    words = [f"{word} {bound:,}".removesuffix(".0") for word, bound in bounds.items() if bound is not None]
    words += ["not empty"] if meta.min_length else []
    return ", ".join([_KINDS[kind], " and ".join(words)] if words else [_KINDS[kind]])


def flag_name(key: str, value: object = None) -> str:
    """The flag of a key; that of a false boolean says no."""
    return f"--{'no-' if value is False else ''}{key.replace('_', '-')}"


def to_flags(values: Mapping[str, Any]) -> list[str]:
    """Arguments of a command line that give these values."""
    arguments = []
    for key, value in values.items():
        arguments += [flag_name(key, value)] if isinstance(value, bool) else [flag_name(key), str(value)]
    return arguments


def to_toml(value: object) -> str:
    """A scalar as TOML writes it."""
    if isinstance(value, float):
        return repr(value)
    # JSON's strings are TOML's, but for this one character.
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")
