"""The last stage: the denoiser learns to turn noise into pictures as the captions say."""

import math
from pathlib import Path

import numpy as np
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from services.demo.training.captions import caption
from services.demo.training.latents import SIZES, Latents
from services.demo.training.pictures import Thing
from services.demo.training.progress import steps, update_means
from services.demo.training.saving import SavedState
from services.demo.training.text import WIDTH, TextEncoders

LEARNING_RATE = 1.5e-3
TEXT_RATE = 0.2  # of the learning rate: the encoders know the captions already
WARM_UP = 60
CONSTANT_UNTIL = 0.35  # of all steps; then down to 0 with the square root, as Hägele et al. 2024 (arXiv 2405.18392)
EMA = 0.999
WITHOUT_CAPTION = 0.1
UNIFORM_TIMES = 0.15
TIME_SHIFT = 0.3
# The pipeline puts as many zero tokens after a caption as its ``max_sequence_length`` says, in the place of T5. The
# picture must not depend on their number: 256 is the pipeline's default, the few of most steps cost less.
ZERO_TOKENS, ZERO_TOKEN_SHARES = (1, 8, 20, 77, 256), (0.55, 0.2, 0.15, 0.06, 0.04)


class Generator(nn.Module):
    """What is trained together: the denoiser and, slowly, the text encoders."""

    def __init__(self, encoders: TextEncoders):
        super().__init__()
        self.encoders = encoders
        self.transformer = SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=8,
            out_channels=8,
            num_layers=6,
            num_attention_heads=4,
            attention_head_dim=36,
            joint_attention_dim=2 * WIDTH,
            pooled_projection_dim=2 * WIDTH,
            caption_projection_dim=144,
            pos_embed_max_size=24,
            qk_norm="rms_norm",
        )

    def forward(self, noised: Tensor, times: Tensor, captions: list[str], zero_tokens: int) -> Tensor:
        """The velocity (N, 8, H, W) of ``noised`` latents at ``times`` (N,) from 0, the picture, to 1, noise."""
        hidden, pooled = self.encoders(captions)
        return self.transformer(
            hidden_states=noised,
            timestep=times * 1000,
            encoder_hidden_states=functional.pad(hidden, (0, 0, 0, zero_tokens)),
            pooled_projections=pooled,
            return_dict=False,
        )[0]


def train_denoiser(
    things: list[Thing], latents: list[Latents], encoders: TextEncoders, folder: Path, seed: int, total: int
) -> Generator:
    """Trains for ``total`` steps and returns the moving average of the weights."""
    torch.manual_seed(seed)
    model = Generator(encoders)
    optimizers, schedules = _optimizers(model, total)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA))
    parts = {f"optimizer{number}": part for number, part in enumerate(optimizers)}
    parts |= {f"schedule{number}": part for number, part in enumerate(schedules)}
    state = SavedState(folder / "denoiser.pt", model=model, average=average, **parts)
    figures: dict[str, float] = {}
    for step in steps("denoiser", state.load(), total, figures):
        loss = _loss(model, things, latents, np.random.default_rng((seed, step)))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        average.update_parameters(model)
        update_means(figures, kept=0.99, loss=loss.item())
        state.save_now_and_then(step + 1)
    state.save(total)
    return average.module


def _loss(model: Generator, things: list[Thing], latents: list[Latents], random: np.random.Generator) -> Tensor:
    """The flow-matching loss of one random batch: the velocity to predict is noise minus picture."""
    number = int(random.choice(len(SIZES), p=[size.share for size in SIZES]))
    source, batch = latents[number], SIZES[number].batch
    rows = random.integers(len(source.things), size=batch)
    captions = [
        "" if random.random() < WITHOUT_CAPTION else caption(things[source.things[row]], source.colours[row], random)
        for row in rows
    ]
    torch.manual_seed(int(random.integers(2**62)))
    clean = source.values[torch.from_numpy(rows)].float()
    noise = torch.randn_like(clean)
    times = torch.sigmoid(torch.randn(batch) + TIME_SHIFT)
    times = torch.where(torch.rand(batch) < UNIFORM_TIMES, torch.rand(batch), times)
    mix = times.view(-1, 1, 1, 1)
    zero_tokens = int(random.choice(ZERO_TOKENS, p=ZERO_TOKEN_SHARES))
    with torch.autocast("cpu", torch.bfloat16):
        velocity = model((1 - mix) * clean + mix * noise, times, captions, zero_tokens)
    return functional.mse_loss(velocity.float(), noise - clean)


def _optimizers(model: Generator, total: int) -> tuple[list, list]:
    """Muon for the matrices of the transformer's blocks, AdamW for the rest; the text encoders learn slowly."""
    named = list(model.transformer.named_parameters())
    matrices = [value for name, value in named if _is_block_matrix(name, value)]
    rest = [value for name, value in named if not _is_block_matrix(name, value)]
    optimizers = [
        torch.optim.Muon(matrices, lr=LEARNING_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": rest}, {"params": list(model.encoders.parameters()), "lr": LEARNING_RATE * TEXT_RATE}],
            lr=LEARNING_RATE,
            betas=(0.9, 0.98),
            weight_decay=0.01,
        ),
    ]

    def factor(step: int) -> float:
        falling = step / total - CONSTANT_UNTIL
        return min(1.0, (step + 1) / WARM_UP, 1 - math.sqrt(max(0.0, falling) / (1 - CONSTANT_UNTIL)))

    return optimizers, [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers]


def _is_block_matrix(name: str, value: Tensor) -> bool:
    return name.startswith("transformer_blocks.") and value.ndim == 2 and ".norm" not in name
