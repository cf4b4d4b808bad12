"""The first stage: an autoencoder that makes 8 channels at a quarter of the size of a picture, and back."""

from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn import functional

from services.demo.training.progress import steps, update_means
from services.demo.training.saving import SavedState
from services.demo.training.views import PictureBook

BATCH = 24
CROP = 64
LEARNING_RATE = 2e-3
KL_WEIGHT = 2e-3
STEPS = 2200


def new_vae() -> AutoencoderKL:
    """The autoencoder before training."""
    return AutoencoderKL(
        block_out_channels=(16, 32, 64),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=8,
        norm_num_groups=8,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        sample_size=64,
        shift_factor=0.0,
    )


def train_vae(book: PictureBook, folder: Path, seed: int) -> AutoencoderKL:
    """Trains the autoencoder, or loads the one that an earlier call finished in ``folder``."""
    finished = folder / "vae"
    if finished.is_dir():
        return AutoencoderKL.from_pretrained(finished)
    torch.manual_seed(seed)
    vae = new_vae()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.05)
    state = SavedState(folder / "vae.pt", vae=vae, optimizer=optimizer, schedule=schedule)
    figures: dict[str, float] = {}
    for step in steps("autoencoder", state.load(), STEPS, figures):
        random = np.random.default_rng((seed, step))
        torch.manual_seed(int(random.integers(2**62)))
        pictures = as_input(np.stack([book.crop(random, CROP) for _ in range(BATCH)]))
        with torch.autocast("cpu", torch.bfloat16):
            distribution = vae.encode(pictures).latent_dist
            again = vae.decode(distribution.sample()).sample.float()
        squared = functional.mse_loss(again, pictures)
        loss = functional.l1_loss(again, pictures) + _edge_loss(again, pictures) + squared
        loss = loss + KL_WEIGHT * distribution.kl().float().mean() / distribution.mean[0].numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        update_means(figures, loss=loss.item(), dB=_psnr(squared))
        state.save_now_and_then(step + 1)
    vae.eval()
    vae.register_to_config(scaling_factor=1 / _latent_deviation(vae, book, seed))
    partial = finished.with_suffix(".partial")
    vae.save_pretrained(partial)
    partial.rename(finished)  # last, so that a folder of this name is whole
    return vae


def as_input(pictures: np.ndarray) -> Tensor:
    """RGB uint8 (N, H, W, 3) as float (N, 3, H, W) in -1 to 1."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float().div(127.5).sub(1).contiguous()


def _edge_loss(one: Tensor, other: Tensor) -> Tensor:
    """The mean absolute difference of the differences between neighbouring pixels: keeps outlines sharp."""
    across = functional.l1_loss(one.diff(dim=-1), other.diff(dim=-1))
    return across + functional.l1_loss(one.diff(dim=-2), other.diff(dim=-2))


def _psnr(squared: Tensor) -> float:
    return float(10 * torch.log10(4 / squared.detach()))


@torch.no_grad()
def _latent_deviation(vae: AutoencoderKL, book: PictureBook, seed: int) -> float:
    random = np.random.default_rng((seed, STEPS))
    pictures = as_input(np.stack([book.crop(random, CROP) for _ in range(256)]))
    return float(vae.encode(pictures).latent_dist.mode().std())
