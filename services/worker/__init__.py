"""The worker: one model on one device, its tensors and the batched denoise.

Role: this file sets what must be in the environment before torch is imported; it imports nothing that imports torch.
"""

import os


def prepare_environment() -> None:
    """Sets what torch and tokenizers read once, when they are imported. Values already set by the user are kept."""
    # Two busy-waiting workers on one machine were seen five times slower than two that wait passively.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
