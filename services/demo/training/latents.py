"""The pictures as the denoiser sees them: encoded once, at every size that it learns."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from services.demo.training.progress import steps
from services.demo.training.saving import save_whole, stop_if_asked
from services.demo.training.vae import as_input
from services.demo.training.views import PictureBook

BATCH = 32


@dataclass(frozen=True)
class Size:
    """A size of picture in pixels: how many are encoded, how often a batch has this size, and how many it holds.

    The batch shrinks as the picture grows, so that every step costs about the same.
    """

    width: int
    height: int
    count: int
    share: float
    batch: int


SIZES = (
    Size(64, 64, 10_000, 0.56, 32),
    Size(48, 48, 3_000, 0.08, 32),
    Size(96, 64, 3_000, 0.08, 24),
    Size(64, 96, 3_000, 0.08, 24),
    Size(96, 96, 3_000, 0.09, 16),
    Size(128, 64, 2_000, 0.04, 16),
    Size(64, 128, 2_000, 0.04, 16),
    Size(128, 128, 2_000, 0.03, 8),
)


@dataclass(frozen=True)
class Latents:
    """Encoded views of one size: ``values`` is (N, 8, height / 4, width / 4), scaled to unit deviation.

    ``things`` are indices into the list of things, ``colours`` the colour words or ``None``.
    """

    values: Tensor
    things: list[int]
    colours: list[str | None]


def encode(book: PictureBook, vae: AutoencoderKL, folder: Path, seed: int) -> list[Latents]:
    """Views of every size, encoded; read from ``folder`` where an earlier call left them."""
    finished = folder / "latents.pt"
    if not finished.is_file():
        save_whole([_encode_size(book, vae, size, seed) for size in SIZES], finished)
    return [Latents(**saved) for saved in torch.load(finished, weights_only=True)]


@torch.no_grad()
def _encode_size(book: PictureBook, vae: AutoencoderKL, size: Size, seed: int) -> dict:
    random = np.random.default_rng((seed, size.width, size.height))
    views = [book.view(random, size.width, size.height) for _ in range(size.count)]
    encoded = []
    for batch in steps(f"encoding {size.width}x{size.height}", 0, -(-size.count // BATCH)):
        pictures = np.stack([book.draw(view) for view in views[batch * BATCH : (batch + 1) * BATCH]])
        with torch.autocast("cpu", torch.bfloat16):
            latents = vae.encode(as_input(pictures)).latent_dist.mode()
        stop_if_asked()
        encoded.append((latents.float() * vae.config.scaling_factor).half())
    return {
        "values": torch.cat(encoded),
        "things": [view.thing for view in views],
        "colours": [view.colour for view in views],
    }
