"""Attention of Qwen-Image for rows that differ: in the size of their picture, in the length of their text, or in both.

Role: diffusers' own attention takes one table of rotary embeddings for all rows, that of the first row's size, and has
no padding among image tokens. Here every row brings its own tables (`RowLayout`), and one mask says which keys count.
It knows tensors and sizes; requests and their batch are the business of the file beside it.

Row by row this computes what diffusers does: the tokens that count see each other and nothing else. What comes out in
the places of padding means nothing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage import (
    QwenDoubleStreamAttnProcessor2_0,
    apply_rotary_emb_qwen,
)

# Frames, height and width of one picture in image tokens, in the form that the transformer takes them.
ImageShape = tuple[int, int, int]


class RowLayout(NamedTuple):
    """Where the tokens of each row stand. A table holds its rows one behind the other, each padded to the longest."""

    image_rotary: torch.Tensor  # (rows * image tokens, head width / 2), complex
    text_rotary: torch.Tensor  # (rows * text tokens, head width / 2), complex
    # (rows, 1, 1, text tokens + image tokens) bool, True where a key counts; None: all of them
    keys: torch.Tensor | None


def row_layout(
    pos_embed: Any,
    shapes: Sequence[ImageShape],
    text_tokens: int,
    text_mask: torch.Tensor | None,
    image_mask: torch.Tensor | None,
    device: torch.device,
) -> RowLayout:
    """The layout of rows with pictures of these `shapes` and texts padded to `text_tokens`.

    `pos_embed` is the transformer's own. The masks are (rows, tokens) bool, None where no row is padded.
    """
    # A text begins where the axes of its picture end, so its table too depends on the size.
    tables = {shape: pos_embed([[shape]], max_txt_seq_len=text_tokens, device=device) for shape in set(shapes)}
    longest = max(image.shape[0] for image, _ in tables.values())
    image_rotary = torch.cat([_padded(tables[shape][0], longest) for shape in shapes])
    text_rotary = torch.cat([tables[shape][1] for shape in shapes])
    if text_mask is None and image_mask is None:
        return RowLayout(image_rotary, text_rotary, None)
    rows = len(shapes)
    every_text = torch.ones((rows, text_tokens), dtype=torch.bool, device=device)
    every_image = torch.ones((rows, longest), dtype=torch.bool, device=device)
    keys = torch.cat(
        [every_text if text_mask is None else text_mask, every_image if image_mask is None else image_mask], dim=1
    )
    return RowLayout(image_rotary, text_rotary, keys[:, None, None, :])


def _padded(table: torch.Tensor, tokens: int) -> torch.Tensor:
    return torch.cat([table, table.new_zeros((tokens - table.shape[0], table.shape[1]))])


class RowsAttnProcessor(QwenDoubleStreamAttnProcessor2_0):
    """diffusers' attention processor, which also takes a `layout`. Without one it is diffusers' own."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
        layout: RowLayout | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`hidden_states` (rows, image tokens, width) and `encoder_hidden_states` (rows, text tokens, width) attend to
        each other. Returns both, in this order. With a `layout` the rotary embeddings and the mask are its own."""
        if layout is None or encoder_hidden_states is None:
            answer: tuple[torch.Tensor, torch.Tensor] = super().__call__(
                attn,
                hidden_states,
                encoder_hidden_states,
                encoder_hidden_states_mask,
                attention_mask,
                image_rotary_emb,
            )
            return answer
        head_width = attn.inner_dim // attn.heads

        def heads(projected: torch.Tensor, norm: Any = None) -> torch.Tensor:
            split = projected.unflatten(-1, (-1, head_width))
            return split if norm is None else norm(split)

        image, text = hidden_states, encoder_hidden_states
        query = torch.cat(
            [
                _rotated(heads(attn.add_q_proj(text), attn.norm_added_q), layout.text_rotary),
                _rotated(heads(attn.to_q(image), attn.norm_q), layout.image_rotary),
            ],
            dim=1,
        )
        key = torch.cat(
            [
                _rotated(heads(attn.add_k_proj(text), attn.norm_added_k), layout.text_rotary),
                _rotated(heads(attn.to_k(image), attn.norm_k), layout.image_rotary),
            ],
            dim=1,
        )
        value = torch.cat([heads(attn.add_v_proj(text)), heads(attn.to_v(image))], dim=1)
        mixed = dispatch_attention_fn(query, key, value, attn_mask=layout.keys, backend=self._attention_backend)
        text_part, image_part = mixed.flatten(2, 3).to(query.dtype).split([text.shape[1], image.shape[1]], dim=1)
        for layer in attn.to_out:
            image_part = layer(image_part)
        return image_part, attn.to_add_out(text_part)


def _rotated(heads: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """(rows, tokens, heads, width) with each row turned by its own table: to diffusers, one row of all tokens."""
    return apply_rotary_emb_qwen(heads.flatten(0, 1)[None], rotary, use_real=False).view_as(heads)
