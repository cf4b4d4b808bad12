"""One forward pass's input: `StepInputBatch`, and the way back: `scatter_latents`.

Role: request states to rows and rows to requests. Embeddings are padded on the right to the longest, with a mask;
latents and timesteps are gathered at each step into buffers that live as long as the composition stays the same.
It changes no state before `scatter_latents`, and knows neither pipelines nor plans.

Rows: first one conditioned row for each request, in their order; then, in the same order, one unconditioned row for
each request with classifier-free guidance.
"""

from collections.abc import Sequence

import torch

from services.worker.state import Conditioning, DiffusionRequestState


class StepInputBatch:
    """The rows of a fixed set of requests. All of them must have latents of one shape."""

    def __init__(self, states: Sequence[DiffusionRequestState]) -> None:
        self.states = tuple(states)
        device = states[0].latents.device
        guided = [index for index, state in enumerate(states) if state.uncond is not None]
        # (guided requests,) int64: the place of each unconditioned row's request in `states`
        self.guided = torch.tensor(guided, dtype=torch.int64, device=device)
        rows = [state.cond for state in states] + [state.uncond for state in states if state.uncond is not None]
        self.prompt_embeds, self.prompt_mask = pad_prompts(rows)  # (rows, tokens, width), (rows, tokens)
        self.pooled_embeds = _pooled(rows)  # (rows, width), or None where the model has none
        # (requests, 1, 1, 1) float32
        scales = [state.guidance_scale for state in states]
        self.guidance_scale = torch.tensor(scales, dtype=torch.float32, device=device).view(-1, 1, 1, 1)
        self.latents = torch.empty(
            (len(rows), *states[0].latents.shape[1:]), dtype=states[0].latents.dtype, device=device
        )
        self.timesteps = torch.empty((len(rows),), dtype=torch.float32, device=device)  # exact: all are below 2**24

    @property
    def requests(self) -> int:
        return len(self.states)

    @property
    def rows(self) -> int:
        return int(self.latents.shape[0])

    def is_of(self, states: Sequence[DiffusionRequestState]) -> bool:
        """Whether the composition is this one."""
        return len(states) == len(self.states) and all(a is b for a, b in zip(states, self.states, strict=True))

    def gather(self) -> None:
        """Fills latents and timesteps from where the requests stand now."""
        count = self.requests
        torch.cat([state.model_input() for state in self.states], out=self.latents[:count])
        self.timesteps[:count] = torch.stack([state.timesteps[state.step_index] for state in self.states])
        if self.rows > count:
            self.latents[count:] = self.latents[self.guided]
            self.timesteps[count:] = self.timesteps[self.guided]


def pad_prompts(rows: Sequence[Conditioning]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt embeddings of all rows, zeros on the right up to the longest, and the mask of the tokens that count."""
    first = rows[0].prompt_embeds
    longest = max(row.prompt_embeds.shape[1] for row in rows)
    embeds = first.new_zeros((len(rows), longest, first.shape[2]))
    mask = torch.zeros((len(rows), longest), dtype=torch.bool, device=first.device)
    for index, row in enumerate(rows):
        tokens = row.prompt_embeds.shape[1]
        embeds[index, :tokens] = row.prompt_embeds[0]
        mask[index, :tokens] = True if row.prompt_mask is None else row.prompt_mask[0]
    return embeds, mask


def _pooled(rows: Sequence[Conditioning]) -> torch.Tensor | None:
    pooled = [row.pooled_embeds for row in rows if row.pooled_embeds is not None]
    if not pooled:
        return None
    if len(pooled) != len(rows):
        raise ValueError("some rows of the batch have pooled embeddings and some have none")
    return torch.cat(pooled)


def guide(batch: StepInputBatch, noise_pred: torch.Tensor) -> torch.Tensor:
    """Classifier-free guidance: (rows, …) predictions to one for each request, each with its own scale.

    Ho and Salimans 2022, in the form that diffusers computes: uncond + scale * (cond - uncond).
    """
    count = batch.requests
    cond, uncond = noise_pred[:count], noise_pred[count:]
    if len(uncond) == 0:
        return cond
    if len(uncond) == count:
        return _guided(uncond, cond, batch.guidance_scale)
    result = cond.clone()
    result[batch.guided] = _guided(uncond, cond[batch.guided], batch.guidance_scale[batch.guided])
    return result


def _guided(uncond: torch.Tensor, cond: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    # The product is rounded to the tensors' own type before the sum, as it is with a plain number for a scale.
    return uncond + (scale * (cond - uncond)).to(uncond.dtype)


def scatter_latents(states: Sequence[DiffusionRequestState], latents: Sequence[torch.Tensor]) -> None:
    """Puts each request's new latents into its state; it has one more step behind it."""
    for state, new in zip(states, latents, strict=True):
        state.latents = new
        state.step_index += 1
