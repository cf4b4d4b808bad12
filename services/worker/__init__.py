"""The worker: one model on one device, its tensors and the batched denoise.

Role: this file sets what must be in the environment before torch is imported; it imports nothing that imports torch.
"""

import contextlib
import ctypes
import os

# Of glibc's malloc.h. Freed memory up to these sizes is kept for the next step instead of being given back to the
# system, which then clears every page of it anew: on a CPU that took 6 % of the time of a step.
_M_TRIM_THRESHOLD, _TRIM_BYTES = -1, 256 * 2**20
_M_MMAP_THRESHOLD, _MMAP_BYTES = -3, 32 * 2**20  # the most that it takes


def prepare_environment() -> None:
    """Sets what torch, tokenizers and transformers read once, when they are imported. What the user has set is kept."""
    # Two busy-waiting workers on one machine were seen five times slower than two that wait passively.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # It says at every start that torchvision, which no family here needs, is not installed.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
