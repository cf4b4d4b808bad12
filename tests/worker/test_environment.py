"""What must be true before torch is imported."""

import os
import subprocess
import sys

import pytest

from services.worker import prepare_environment

CHECK = """
import os, sys
os.environ.pop("OMP_WAIT_POLICY", None)
import services.worker
assert "torch" not in sys.modules
services.worker.prepare_environment()
assert "torch" not in sys.modules
assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
"""


def test_the_environment_is_set_before_torch_is_there() -> None:
    subprocess.run([sys.executable, "-c", CHECK], check=True, timeout=60)


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    prepare_environment()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
