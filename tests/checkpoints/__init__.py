"""Tiny checkpoints of the real classes, built from a seed and written with `save_pretrained`.

Random weights answer to nothing: the text hardly reaches the picture. So the gains on the text path are raised and each
output is scaled to the size that trained models have, until a checkpoint is *sensitive* (another prompt, seed, step
count or guidance moves the picture a lot) and still *well conditioned* (a rounding error does not).
`tests/worker/test_checkpoints.py` measures both.
"""

from collections.abc import Callable
from pathlib import Path

from tests.checkpoints.flux import save_flux_dev
from tests.checkpoints.flux2_klein import save_flux2_klein
from tests.checkpoints.pixart_sigma import save_pixart
from tests.checkpoints.qwen_image import save_qwen_image
from tests.checkpoints.stable_diffusion import save_sd1, save_sd1_ancestral, save_sd2
from tests.checkpoints.stable_diffusion_3 import save_sd3
from tests.checkpoints.stable_diffusion_xl import save_sdxl
from tests.checkpoints.wan import save_wan
from tests.checkpoints.z_image import save_z_image

# Those with a step pipeline: each writes its checkpoint into a folder and returns it.
CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "flux": save_flux_dev,
    "flux2-klein": save_flux2_klein,
    "sd1": save_sd1,
    "sd1-ancestral": save_sd1_ancestral,
    "sd2": save_sd2,
    "sd3": lambda folder: save_sd3(folder, t5=False),
    "sd3-t5": lambda folder: save_sd3(folder, t5=True),
    "sdxl": save_sdxl,
    "pixart": save_pixart,
    "qwen-image": save_qwen_image,
    "wan": save_wan,
    "z-image": save_z_image,
}
