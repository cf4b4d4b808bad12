"""What must be true before torch is imported."""

import os
import platform
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


FAULTS = """
import resource, services.worker
services.worker.prepare_environment()
import threading, torch
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        torch.ones(4 * 2**20)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
thread = threading.Thread(target=pages)
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator alone")
def test_memory_that_a_step_frees_is_there_for_the_next_unless_the_user_has_chosen() -> None:
    """16 MiB a hundred times: 4,096 pages each time, if they are given back each time."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    faults = [
        int(subprocess.check_output([sys.executable, "-c", FAULTS], env=clean | own, timeout=60))
        for own in ({}, {"MALLOC_MMAP_THRESHOLD_": "131072"})
    ]
    assert faults[0] < 100_000
    assert faults[1] > 200_000
