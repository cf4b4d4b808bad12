"""Settings: four doors to the same frozen record, and what is said of a value that can't be used."""

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import fields

from common.config import GatewayConfig, SchedulerConfig
from common.errors import ConfigError
from services.demo import DEMO_CHECKPOINT
from services.settings import (
    COMMANDS,
    DEFAULT_FILE,
    FILE_VARIABLE,
    KEYS,
    NO_FILE,
    NO_SETTINGS,
    VARIABLES,
    expected,
    read_file,
    resolve,
)
from tests.settings_doors import as_flags, as_variables, other_values, table, written


@pytest.fixture(autouse=True)
def no_default_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


# The doors.


@pytest.mark.parametrize("command", COMMANDS)
def test_every_setting_comes_through_every_door_to_the_same_record(command: str, tmp_path: Path) -> None:
    values = other_values(command)
    record = COMMANDS[command](**values)
    by_flags = resolve(command, as_flags(values), {}, NO_FILE)
    by_variables = resolve(command, {}, as_variables(command, values), NO_FILE)
    by_file = resolve(command, {}, {}, written(tmp_path, table(command, values)))
    assert by_flags.config == by_variables.config == by_file.config == record
    for settings, door in ((by_flags, "flag"), (by_variables, "variable"), (by_file, "file")):
        assert {setting.door for setting in settings.settings} == {door}


def test_a_flag_goes_before_a_variable_that_before_the_file_that_before_the_default(tmp_path: Path) -> None:
    file = written(tmp_path, "[gateway]\nhost = 'file'\nport = 1\nscheduler = 'file'")
    environ = {"STEPWEAVE_GATEWAY_HOST": "variable", "STEPWEAVE_GATEWAY_PORT": "2"}
    settings = resolve("gateway", {"host": "flag"}, environ, file)
    found = {setting.key: (setting.value, setting.place) for setting in settings.settings}
    assert found["host"] == ("flag", "--host")
    assert found["port"] == (2, "STEPWEAVE_GATEWAY_PORT")
    assert found["scheduler"] == ("file", f"{tmp_path / 'its.toml'}:4")
    assert found["name"] == ("gateway", "default")
    assert settings.config == GatewayConfig(host="flag", port=2, scheduler="file")


def test_a_bad_value_that_is_not_in_force_stops_nothing() -> None:
    assert resolve("gateway", {"port": "1"}, {"STEPWEAVE_GATEWAY_PORT": "no"}, NO_FILE).config.port == 1


def test_without_a_model_it_is_the_demo_checkpoint_under_its_name() -> None:
    for command in ("serve", "worker"):
        demo = resolve(command, {}, {}, NO_FILE).config
        assert (demo.model, demo.served_model_name) == (str(DEMO_CHECKPOINT), "demo")
        named = resolve(command, {"served_model_name": "mine"}, {}, NO_FILE).config
        assert (named.model, named.served_model_name) == (str(DEMO_CHECKPOINT), "mine")
        other = resolve(command, {"model": "folder"}, {}, NO_FILE).config
        assert (other.model, other.served_model_name) == ("folder", "")


@pytest.mark.parametrize("text", ["true", "True", "1"])
def test_a_variable_can_turn_a_switch_on(text: str) -> None:
    assert resolve("worker", {}, {"STEPWEAVE_WORKER_STEP_EXECUTION": text}, NO_FILE).config.step_execution is True


@pytest.mark.parametrize("text", ["false", "FALSE", "0"])
def test_a_variable_can_turn_a_switch_off(text: str) -> None:
    assert resolve("worker", {}, {"STEPWEAVE_WORKER_STEP_EXECUTION": text}, NO_FILE).config.step_execution is False


def test_a_whole_number_of_seconds_may_be_written_as_one(tmp_path: Path) -> None:
    file = written(tmp_path, "[scheduler]\nlost_after_s = 7")
    assert resolve("scheduler", {}, {}, file).config == SchedulerConfig(lost_after_s=7.0)


def test_an_empty_variable_counts_as_not_set(tmp_path: Path) -> None:
    file = written(tmp_path, "[gateway]\nport = 1")
    settings = resolve("gateway", {}, {"STEPWEAVE_GATEWAY_PORT": "", "STEPWEAVE_GATEWAY_NAME": ""}, file)
    assert settings.config == GatewayConfig(port=1)


def test_what_is_meant_for_other_commands_is_not_read_and_is_told(tmp_path: Path) -> None:
    file = written(tmp_path, "[serve]\nmax_queue = 1\n[worker]\nthreads = 0\n[scheduler]\nmax_attempts = 2")
    settings = resolve("scheduler", {}, {"STEPWEAVE_SERVE_MAX_QUEUE": "no number"}, file)
    assert settings.config == SchedulerConfig(max_attempts=2)
    assert settings.unread == ("[serve]", "[worker]", "STEPWEAVE_SERVE_MAX_QUEUE")


# Values that can't be used.

BAD = [  # command, key, as text, as TOML, what must be said
    ("serve", "port", "99999", "99999", "an integer, at least 1 and at most 65,535"),
    ("serve", "port", "0", "0", "an integer, at least 1 and at most 65,535"),
    ("serve", "port", "http", '"http"', "an integer, at least 1 and at most 65,535"),
    ("serve", "max_queue", "1.5", "1.5", "an integer, at least 1 and at most 1,000,000"),
    ("serve", "metrics_port", "-1", "-1", "an integer, at least 0 and at most 65,535"),
    ("scheduler", "suspect_after_s", "nan", "nan", "a number, more than 0 and at most 86,400"),
    ("scheduler", "lost_after_s", "inf", "inf", "a number, more than 0 and at most 86,400"),
    ("gateway", "request_timeout_s", "0", "0", "a number, more than 0 and at most 86,400"),
    ("gateway", "request_timeout_s", "ten", "[10]", "a number, more than 0 and at most 86,400"),
    ("worker", "dtype", "half", '"half"', "one of auto, float32, bfloat16, float16"),
    ("worker", "step_execution", "maybe", '"true"', "true or false"),
    ("scheduler", "policy", "lifo", "1979-05-27", "one of fifo"),
]


@pytest.mark.parametrize(("command", "key", "text", "toml", "words"), BAD)
def test_a_value_that_can_not_be_is_refused_at_every_door_in_the_same_words(
    tmp_path: Path, command: str, key: str, text: str, toml: str, words: str
) -> None:
    said = []
    variable = f"STEPWEAVE_{command}_{key}".upper()
    for flags, environ, file in (
        ({key: text}, {}, NO_FILE),
        ({}, {variable: text}, NO_FILE),
        ({}, {}, written(tmp_path, f"# first line\n[{command}]\n\n{key} = {toml}\n")),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve(command, flags, environ, file)
        said.append(str(caught.value))
    must_be = f": {key} must be {words}"
    assert said[0] == f"--{key.replace('_', '-')} {text}{must_be}"
    assert said[1] == f"{variable}={text}{must_be}"
    assert said[2].startswith(f"{tmp_path / 'its.toml'}:4: {key} = ")
    assert said[2].endswith(must_be)


@pytest.mark.parametrize("toml", ["8", "true", "[]"])
def test_a_string_must_be_one_in_a_file(tmp_path: Path, toml: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"its.toml:2: model = .*{re.escape(toml)}: model must be a string, not empty"
    ):
        resolve("worker", {}, {}, written(tmp_path, f"[worker]\nmodel = {toml}"))


def test_a_model_must_have_a_name() -> None:
    with pytest.raises(ConfigError, match=r"^--model '': model must be a string, not empty$"):
        resolve("worker", {"model": ""}, {}, NO_FILE)


def test_every_kind_of_bound_is_told() -> None:
    bounds = {words for command in COMMANDS for field in fields(COMMANDS[command]) for words in [expected(field)]}
    assert "a string" in bounds
    assert not any("None" in words for words in bounds)


# Rules between values.

BROKEN = [
    ("worker", {"max_residents": 4}, "max_residents must be 0 or at least max_num_seqs", "max_num_seqs = 8 (default)"),
    ("serve", {"max_residents": 4}, "max_residents must be 0 or at least max_num_seqs", "max_num_seqs = 8 (default)"),
    ("scheduler", {"suspect_after_s": 9.0}, "no more than lost_after_s", "lost_after_s = 5.0 (default)"),
    ("serve", {"suspect_after_s": 0.25}, "more than a heartbeat (0.5 s)", "lost_after_s = 5.0 (default)"),
    ("gateway", {"metrics_port": 8000}, "different ports", "port = 8000 (default)"),
    ("serve", {"metrics_port": 7999}, "port must not be among the metrics' ports", "port = 8000 (default)"),
]


@pytest.mark.parametrize(("command", "values", "rule", "other"), BROKEN)
def test_values_that_contradict_each_other_are_refused_at_every_door(
    tmp_path: Path, command: str, values: dict[str, Any], rule: str, other: str
) -> None:
    (key, value), *_ = values.items()
    places = {
        f"--{key.replace('_', '-')} {value}": ({key: str(value)}, {}, NO_FILE),
        f"STEPWEAVE_{command}_{key}".upper() + f"={value}": ({}, as_variables(command, values), NO_FILE),
        f"its.toml:2: {key} = {value}": ({}, {}, written(tmp_path, table(command, values))),
    }
    for place, doors in places.items():
        with pytest.raises(ConfigError) as caught:
            resolve(command, *doors)
        for words in (place, rule, other):
            assert words in str(caught.value)


# Names that nobody knows.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[serve]\nport = 1\nmax_quue = 1", "its.toml:3: unknown key max_quue in [serve]; did you mean max_queue?"),
        ("[serve]\nmax-queue = 1", "its.toml:2: unknown key max-queue in [serve]; did you mean max_queue?"),
        ("serve.max_quue = 1", "its.toml:1: unknown key max_quue in [serve]; did you mean max_queue?"),
        ("[gateway]\nmax_queue = 1", "unknown key max_queue in [gateway]; it belongs to [serve], [scheduler]"),
        ("[gateway]\nxyz = 1", "unknown key xyz in [gateway]; known are host, port, "),
        ("\n[schedular]\nmax_queue = 1", "its.toml:2: unknown table [schedular]; did you mean scheduler?"),
        ("[database]", "unknown table [database]; known are serve, gateway, scheduler, worker"),
        ("port = 1", "its.toml:1: port stands in no table; the tables are [serve], [gateway], [scheduler], [worker]"),
        ("serve = 1", "its.toml:1: serve must be a table, [serve] on a line of its own"),
        ("[[serve]]\nport = 1", "serve must be a table"),
        ("[serve]\nport = 1\nport = 2\n", "its.toml is no TOML: Cannot overwrite a value (at line 3, "),
        ("[serve\n", "its.toml is no TOML: "),
    ],
)
def test_a_file_with_what_nobody_knows_is_refused_with_the_line_and_the_nearest_name(
    tmp_path: Path, text: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, text)
    assert words in str(caught.value)


def test_a_line_is_found_after_values_of_several_lines(tmp_path: Path) -> None:
    text = '[worker]\nmodel = """\nmax_num_seqs = 1\n"""\ndevice = """\n[worker]\n"""\r\nmax_num_seqs = 0'
    with pytest.raises(ConfigError, match=r"its.toml:8: max_num_seqs = 0"):
        resolve("worker", {}, {}, written(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("STEPWEAVE_SERVE_MAX_QUUE", "STEPWEAVE_SERVE_MAX_QUEUE"),
        ("STEPWEAVE_MAX_ATTEMPTS", "STEPWEAVE_SERVE_MAX_ATTEMPTS"),
        ("STEPWEAVE_SERVER_HOST", "STEPWEAVE_SERVE_HOST"),
        ("STEPWEAVE_GATEWAY__PORT", "STEPWEAVE_GATEWAY_PORT"),
    ],
)
@pytest.mark.parametrize("value", ["1", ""])
def test_an_unknown_variable_stops_every_command_and_names_the_nearest(name: str, nearest: str, value: str) -> None:
    for command in COMMANDS:
        with pytest.raises(ConfigError, match=rf"^unknown variable {name}; did you mean {nearest}\?$"):
            resolve(command, {}, {name: value}, NO_FILE)


def test_variables_that_are_no_settings_stop_nothing() -> None:
    others = dict.fromkeys(NO_SETTINGS, "7") | {"STEPWEAVER": "x", "PATH": "x"}
    assert resolve("gateway", {}, others, NO_FILE).config == GatewayConfig()


def test_what_kubernetes_sets_for_services_stops_nothing() -> None:
    """As it is in a pod beside Services named stepweave-gateway and stepweave-scheduler."""
    environ = {
        "STEPWEAVE_GATEWAY_SERVICE_HOST": "10.0.0.7",
        "STEPWEAVE_GATEWAY_SERVICE_PORT": "8000",
        "STEPWEAVE_GATEWAY_SERVICE_PORT_HTTP": "8000",
        "STEPWEAVE_GATEWAY_PORT": "tcp://10.0.0.7:8000",
        "STEPWEAVE_GATEWAY_PORT_8000_TCP": "tcp://10.0.0.7:8000",
        "STEPWEAVE_GATEWAY_PORT_8000_TCP_PROTO": "tcp",
        "STEPWEAVE_GATEWAY_PORT_8000_TCP_PORT": "8000",
        "STEPWEAVE_GATEWAY_PORT_8000_TCP_ADDR": "10.0.0.7",
        "STEPWEAVE_SCHEDULER_PORT": "tcp://10.0.0.8:5570",
    }
    settings = resolve("gateway", {}, environ, NO_FILE)
    assert settings.config == GatewayConfig()
    assert settings.unread == ()


def test_no_two_settings_share_a_variable() -> None:
    assert len(VARIABLES) == sum(len(keys) for keys in KEYS.values())
    assert not NO_SETTINGS & VARIABLES.keys()


# Which file.


def test_the_default_file_is_read_where_it_is(tmp_path: Path) -> None:
    assert read_file(None, {}) == NO_FILE
    (tmp_path / DEFAULT_FILE).write_text("[serve]\nport = 1")
    assert resolve("serve", {}, {}, read_file(None, {})).config.port == 1


def test_a_flag_names_the_file_before_a_variable_does(tmp_path: Path) -> None:
    for number, name in enumerate([str(DEFAULT_FILE), "variable.toml", "flag.toml"], 1):
        (tmp_path / name).write_text(f"[serve]\nport = {number}")
    variable = {FILE_VARIABLE: "variable.toml"}
    for flag, environ, port in [(Path("flag.toml"), variable, 3), (None, variable, 2), (None, {FILE_VARIABLE: ""}, 1)]:
        assert resolve("serve", {}, environ, read_file(flag, environ)).config.port == port


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^can't read the settings file no.toml \(--config\): No such file"):
        read_file(Path("no.toml"), {})
    with pytest.raises(ConfigError, match=r"^can't read the settings file no.toml \(STEPWEAVE_CONFIG\): No such file"):
        read_file(None, {FILE_VARIABLE: "no.toml"})
    (tmp_path / DEFAULT_FILE).mkdir()
    with pytest.raises(ConfigError, match=r"^can't read the settings file stepweave.toml: Is a directory"):
        read_file(None, {})


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "marked.toml").write_text("[gateway]\nport = 1", "utf-8-sig")
    assert resolve("gateway", {}, {}, read_file(tmp_path / "marked.toml", {})).config.port == 1


def test_a_file_must_be_utf8(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes("[serve]\nmodel = 'ü'".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin.toml: a settings file must be UTF-8"):
        read_file(tmp_path / "latin.toml", {})
