"""Attention of FLUX.1 and FLUX.2 for rows that differ in the size of their picture.

Role: diffusers' own attention takes one table of rotary embeddings for all rows, and pads no tokens. Here every row may
bring its own table, and a mask says which keys count (`attention_arguments`). It knows tensors; what a request is and
how large is the business of the families' files.

Both models put a row's tokens in the order text, image. What comes out in the places of padding means nothing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.embeddings import apply_rotary_emb
from torch.nn.utils.rnn import pad_sequence

from services.worker.input_batch import StepInputBatch

_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")  # what a processor calls just before it rotates


class RowRotary(NamedTuple):
    """One table of rotary embeddings for each row: (rows, text tokens + image tokens, head width) float32 each."""

    cos: torch.Tensor
    sin: torch.Tensor


class RowRotaryProcessor:
    """diffusers' own attention processor, which also takes a `row_rotary` in place of the table of all rows.

    The rotation acts on each token by itself. So it may as well come before text and image are joined, right after the
    norm of queries and keys, and the wrapped processor does the rest.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __call__(self, attn: Any, *arguments: Any, row_rotary: RowRotary | None = None) -> Any:
        """`arguments` are those of the wrapped processor; the last one is the table of all rows."""
        if row_rotary is None:
            return self._processor(attn, *arguments)
        return self._processor(_RotatingNorms(attn, row_rotary), *arguments[:-1], None)


class _RotatingNorms:
    """An attention module whose norms of queries and keys rotate what they have normalised."""

    def __init__(self, attn: Any, row_rotary: RowRotary) -> None:
        self._attn = attn
        self._row_rotary = row_rotary

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._attn, name)
        if name not in _NORMS:
            return found

        def normed_and_rotated(heads: torch.Tensor) -> torch.Tensor:
            tokens = heads.shape[1]
            # The text comes first. What else is normalised is the image behind it, or both together.
            part = slice(tokens) if "added" in name else slice(-tokens, None)
            return _rotated(found(heads), RowRotary(*(table[:, part] for table in self._row_rotary)))

        return normed_and_rotated


def _rotated(heads: torch.Tensor, rotary: RowRotary) -> torch.Tensor:
    """(rows, tokens, heads, width) with each row turned by its own table: to diffusers, one row of all tokens."""
    tables = (rotary.cos.flatten(0, 1), rotary.sin.flatten(0, 1))
    rotated: torch.Tensor = apply_rotary_emb(heads.flatten(0, 1)[None], tables, sequence_dim=1)
    return rotated.view_as(heads)


def take_row_rotary(transformer: Any) -> None:
    """Lets every attention of the transformer take a `row_rotary`."""
    for module in transformer.modules():
        if isinstance(module, AttentionModuleMixin):
            module.set_processor(RowRotaryProcessor(module.processor))


def attention_arguments(
    batch: StepInputBatch, pos_embed: Any, txt_ids: torch.Tensor, img_ids: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """What the attention of these rows takes beside its usual arguments: nothing where all rows are alike.

    `pos_embed` is the transformer's own, `txt_ids` are the positions (tokens, axes) of every row's text, `img_ids`
    those of each row's picture, the same tensor for pictures of the same size.
    """
    arguments: dict[str, Any] = {}
    if any(ids is not img_ids[0] for ids in img_ids):  # equally many tokens can still be another height and width
        tables = [pos_embed(torch.cat([txt_ids, ids])) for ids in img_ids]
        cos, sin = (pad_sequence(list(rows), batch_first=True) for rows in zip(*tables, strict=True))
        arguments["row_rotary"] = RowRotary(cos, sin)
    if batch.image_mask is not None:
        text_mask = batch.image_mask.new_ones((batch.rows, len(txt_ids)))
        arguments["attention_mask"] = torch.cat([text_mask, batch.image_mask], dim=1)[:, None, None, :]
    return arguments
