"""A process says by its exit code how its service ended, whoever tells it to stop once more."""

import subprocess
import sys

PROGRAM = """
import os, signal
from common.process import run_service

async def service():
    raise SystemExit(7)

try:
    run_service(service())
finally:
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
"""


def test_a_signal_after_the_end_does_not_change_the_outcome() -> None:
    assert (
        subprocess.run([sys.executable, "-c", PROGRAM], check=False, timeout=30, stderr=subprocess.DEVNULL).returncode
        == 7
    )
