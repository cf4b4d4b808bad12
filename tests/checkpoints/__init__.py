"""Tiny checkpoints of the real classes, built from a seed and written with `save_pretrained`.

Random weights answer to nothing: the text hardly reaches the picture. So the gains on the text path are raised and each
output is scaled to the size that trained models have, until a checkpoint is *sensitive* (another prompt, seed, step
count or guidance moves the picture a lot) and still *well conditioned* (a rounding error does not).
`tests/worker/test_checkpoints.py` measures both.
"""

from collections.abc import Callable
from pathlib import Path

from tests.checkpoints.stable_diffusion import save_sd1, save_sd1_ancestral, save_sd2
from tests.checkpoints.stable_diffusion_3 import save_sd3

# Those with a step pipeline: each writes its checkpoint into a folder and returns it.
CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "sd1": save_sd1,
    "sd1-ancestral": save_sd1_ancestral,
    "sd2": save_sd2,
    "sd3": lambda folder: save_sd3(folder, t5=False),
    "sd3-t5": lambda folder: save_sd3(folder, t5=True),
}
