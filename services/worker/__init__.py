"""The worker: one model on one device, its tensors and the batched denoise.

Role: this file sets what must be in the environment before torch is imported; it imports nothing that imports torch.
"""

import os


def prepare_environment() -> None:
    """Sets what torch, tokenizers and transformers read once, when they are imported. What the user has set is kept."""
    # Two busy-waiting workers on one machine were seen five times slower than two that wait passively.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # It says at every start that torchvision, which no family here needs, is not installed.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
