"""Log lines of processes and threads that share a stderr."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LINES = 3_000  # of each thread
PROGRAM = f"""
import logging, threading, structlog
from common.telemetry import configure_logging, identify
configure_logging("service-name", log_format="json")
identify(worker_id="worker-7")
log = structlog.get_logger()
def write():
    for number in range({LINES}):
        log.info("line", number=number, filling="x" * 300)
threads = [threading.Thread(target=write) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("a.library").exception("said by a library")
"""


def test_lines_of_all_threads_and_libraries_stay_whole_and_say_whose_they_are(tmp_path: Path) -> None:
    unbuffered = os.environ | {"PYTHONUNBUFFERED": "1"}  # as containers set it: every write goes out by itself
    with (tmp_path / "log").open("ab") as shared:
        children = [subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=shared, env=unbuffered) for _ in range(2)]
        assert [child.wait(timeout=60) for child in children] == [0, 0]
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert len(lines) == 2 * (2 * LINES + 1)
    by_libraries = [line for line in lines if line["event"] == "said by a library"]
    assert all("ZeroDivisionError" in line["exception"] for line in by_libraries)
    assert len(by_libraries) == 2
    assert {(line["service"], line["worker_id"]) for line in lines} == {("service-name", "worker-7")}


SAYING = """
import logging, sys, warnings, structlog
from common.telemetry import configure_logging
configure_logging("service-name", *sys.argv[1:])
def fail(prompt):
    held = {"prompt": [prompt]}
    raise KeyError("a fault of ours")
for log in (structlog.get_logger(), logging.getLogger("a.library")):
    try:
        fail("one " + "secret")
    except KeyError:
        log.exception("it failed")
library = logging.getLogger("another.library")
library.setLevel(logging.DEBUG)
library.info("a remark")
library.warning("a doubt")
warnings.warn("a forewarning")
"""


def said(*arguments: str) -> str:
    program = [sys.executable, "-c", SAYING, *arguments]
    return subprocess.run(program, check=True, capture_output=True, text=True, timeout=60).stderr


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_traceback_shows_no_local_variables(log_format: str) -> None:
    """They are prompts."""
    text = said("info", log_format)
    assert text.count("a fault of ours") >= 2, "its traceback is there, with its words"
    assert text.count("in fail") == 2
    assert "one secret" not in text


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_the_level_holds_for_libraries_and_warnings_too(level: str) -> None:
    lines = [json.loads(line) for line in said(level, "json").splitlines()]  # all in one form
    assert {line["service"] for line in lines} == {"service-name"}
    events = " ".join(line["event"] for line in lines)
    assert ("a doubt" in events, "a forewarning" in events) == (level != "error", level != "error")
    assert "a remark" not in events, "of libraries only what is wrong"
