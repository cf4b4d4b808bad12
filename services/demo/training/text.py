"""The two text encoders, taught what the pictures look like before the denoiser starts to listen to them."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from services.demo.training.captions import caption
from services.demo.training.latents import Latents
from services.demo.training.pictures import Thing
from services.demo.training.progress import steps, update_means
from services.demo.training.saving import SavedState, save_whole

WIDTH = 96
COMPONENTS = 128
BATCH = 128
LEARNING_RATE = 2e-3
STEPS = 2000
CONTRASTIVE_WEIGHT = 0.2
TEMPERATURE = 0.07


class TextEncoders(nn.Module):
    """Both encoders as the Stable Diffusion 3 pipeline uses them."""

    def __init__(self, tokenizer: CLIPTokenizer):
        super().__init__()
        self.tokenizer = tokenizer
        config = CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            projection_dim=WIDTH,
            max_position_embeddings=tokenizer.model_max_length,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        self.encoders = nn.ModuleList(CLIPTextModelWithProjection(config) for _ in range(2))

    def forward(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        """The embeddings of the tokens (N, tokens, 192) and of the whole captions (N, 192)."""
        tokens = self.tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt").input_ids
        outputs = [encoder(tokens, output_hidden_states=True) for encoder in self.encoders]
        hidden = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        return hidden, torch.cat([output.text_embeds for output in outputs], dim=-1)


def train_text(
    things: list[Thing], latents: Latents, tokenizer: CLIPTokenizer, folder: Path, seed: int
) -> TextEncoders:
    """Trains both encoders to tell a picture's main components from its caption, or loads the finished ones."""
    torch.manual_seed(seed)
    encoders = TextEncoders(tokenizer)
    finished = folder / "text.pt"
    if finished.is_file():
        encoders.load_state_dict(torch.load(finished, weights_only=True))
        return encoders
    components = _components(latents.values)
    head = nn.Linear(2 * WIDTH, COMPONENTS)
    both = nn.ModuleList([encoders, head])
    optimizer = torch.optim.AdamW(both.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.05)
    state = SavedState(folder / "text-state.pt", both=both, optimizer=optimizer, schedule=schedule)
    figures: dict[str, float] = {}
    for step in steps("text encoders", state.load(), STEPS, figures):
        random = np.random.default_rng((seed, step))
        rows = random.integers(len(latents.things), size=BATCH)
        captions = [caption(things[latents.things[row]], latents.colours[row], random) for row in rows]
        wanted = components[torch.from_numpy(rows)]
        found = head(encoders(captions)[1])
        squared = functional.mse_loss(found, wanted)
        similar = functional.normalize(found) @ functional.normalize(wanted).T / TEMPERATURE
        contrastive = functional.cross_entropy(similar, torch.arange(BATCH))
        loss = squared + CONTRASTIVE_WEIGHT * contrastive
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(both.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        right = (similar.argmax(dim=1) == torch.arange(BATCH)).float().mean().item()
        update_means(figures, squared=squared.item(), contrastive=contrastive.item(), right=right)
        state.save_now_and_then(step + 1)
    save_whole(encoders.state_dict(), finished)
    return encoders


def _components(values: Tensor) -> Tensor:
    """The main components of each picture's latents, (N, 128), with unit deviation over all."""
    flat = values.float().flatten(1)
    flat = flat - flat.mean(dim=0)
    _, _, directions = torch.pca_lowrank(flat, q=COMPONENTS, center=False)
    projected = flat @ directions
    return projected / projected.std()
