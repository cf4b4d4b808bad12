"""One forward pass's input: `StepInputBatch`, and the way back: `scatter_latents`.

Role: request states to rows and rows to requests. Embeddings are padded on the right to the longest, with a mask, and
so are latents that are sequences of image tokens; latents and timesteps are gathered at each step into buffers that
live as long as the composition stays the same. It changes no state before `scatter_latents`, and knows neither
pipelines nor plans.

Rows: first one conditioned row for each request, in their order; then, in the same order, one unconditioned row for
each request with classifier-free guidance.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from services.worker.state import Conditioning, DiffusionRequestState

T = TypeVar("T")

PACKED_NDIM = 3  # (rows, image tokens, channels): latents that are a sequence, and can be padded


class StepInputBatch:
    """The rows of a fixed set of requests, whose latents are alike but for their size."""

    def __init__(self, states: Sequence[DiffusionRequestState]) -> None:
        self.states = tuple(states)
        guided = [index for index, state in enumerate(states) if state.uncond is not None]
        self.guided_states = tuple(states[index] for index in guided)
        self.row_states = (*self.states, *self.guided_states)  # the request of each row
        first = states[0].latents
        # (guided requests,) int64: the place of each unconditioned row's request in `states`
        self.guided = torch.tensor(guided, dtype=torch.int64, device=first.device)
        rows = [state.cond for state in states] + [state.uncond for state in states if state.uncond is not None]
        # (rows, tokens, width) and (rows, tokens) bool, True where a token counts; no mask where all of them do
        self.prompt_embeds, self.prompt_mask = pad_prompts(rows)
        self.pooled_embeds = _pooled(rows)  # (rows, width), or None where the model has none
        scales = [state.guidance_scale for state in states]
        self.guidance_scale = torch.tensor(scales, dtype=torch.float32, device=first.device)  # (requests,)
        self.timesteps = torch.empty((len(rows),), dtype=torch.float32, device=first.device)  # exact: below 2**24
        self._made: dict[str, Any] = {}

        self.image_lengths = tuple(state.latents.shape[1] for state in self.row_states)  # of each row, where packed
        self.image_mask: torch.Tensor | None = None  # (rows, image tokens) bool, where some are padding
        # (rows, …), or where sizes differ and can't be padded, a list of (…) for each row
        self.latents: torch.Tensor | list[torch.Tensor]
        shapes = {state.latents.shape for state in states}
        self._padded = len(shapes) > 1 and first.ndim == PACKED_NDIM
        self._listed = len(shapes) > 1 and not self._padded
        if self._listed:
            self.latents = []
        elif self._padded:
            longest = max(self.image_lengths)
            self.latents = first.new_zeros((len(rows), longest, first.shape[2]))
            lengths = torch.tensor(self.image_lengths, device=first.device)
            self.image_mask = torch.arange(longest, device=first.device) < lengths[:, None]
        else:
            self.latents = first.new_empty((len(rows), *first.shape[1:]))

    @property
    def requests(self) -> int:
        return len(self.states)

    @property
    def rows(self) -> int:
        return len(self.row_states)

    def is_of(self, states: Sequence[DiffusionRequestState]) -> bool:
        """Whether the composition is this one."""
        return len(states) == len(self.states) and all(a is b for a, b in zip(states, self.states, strict=True))

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What a family derives from the composition alone, made at its first step and kept while it stays the same."""
        if name not in self._made:
            self._made[name] = make()
        made: T = self._made[name]
        return made

    def gather(self) -> None:
        """Fills latents and timesteps from where the requests stand now."""
        count = self.requests
        self._gather_latents()
        self.timesteps[:count] = torch.stack([state.timesteps[state.step_index] for state in self.states])
        if self.rows > count:
            self.timesteps[count:] = self.timesteps[self.guided]

    def _gather_latents(self) -> None:
        count = self.requests
        if self._listed:
            inputs = {id(state): state.model_input()[0] for state in self.states}
            self.latents = [inputs[id(state)] for state in self.row_states]
            return
        assert isinstance(self.latents, torch.Tensor)
        if self._padded:
            for row, state in zip(self.latents, self.states, strict=False):
                row[: state.latents.shape[1]] = state.model_input()[0]
        else:
            torch.cat([state.model_input() for state in self.states], out=self.latents[:count])
        if self.rows > count:
            self.latents[count:] = self.latents[self.guided]

    def split(self, noise_pred: torch.Tensor) -> list[torch.Tensor]:
        """(requests, …) predictions to one for each request, (1, …), without the padding."""
        if self._padded:
            lengths = self.image_lengths[: self.requests]
            return [noise_pred[index : index + 1, :length] for index, length in enumerate(lengths)]
        return list(noise_pred.split(1))


def pad_prompts(rows: Sequence[Conditioning]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prompt embeddings of all rows, zeros on the right up to the longest, and the mask of the tokens that count; None
    instead of a mask in which every token does."""
    lengths = [row.prompt_embeds.shape[1] for row in rows]
    first, longest = rows[0].prompt_embeds, max(lengths)
    if len(set(lengths)) == 1 and all(row.prompt_mask is None for row in rows):
        return torch.cat([row.prompt_embeds for row in rows]), None
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
    scale = batch.guidance_scale.view(-1, *[1] * (noise_pred.ndim - 1))
    if len(uncond) == count:
        return _guided(uncond, cond, scale)
    result = cond.clone()
    result[batch.guided] = _guided(uncond, cond[batch.guided], scale[batch.guided])
    return result


def _guided(uncond: torch.Tensor, cond: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    # The product is rounded to the tensors' own type before the sum, as it is with a plain number for a scale.
    return uncond + (scale * (cond - uncond)).to(uncond.dtype)


def scatter_latents(states: Sequence[DiffusionRequestState], latents: Sequence[torch.Tensor]) -> None:
    """Puts each request's new latents into its state; it has one more step behind it."""
    for state, new in zip(states, latents, strict=True):
        state.latents = new
        state.step_index += 1
