"""Attention `unpadded`: a padded batch without its padding, by PyTorch's variable-length kernel.

It is what `flash_attention_2` of transformers does with the package flash-attn, which few machines have. Here
the indices are computed once per forward, there in every layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from rlt_lightning.numerics.attention import Segments, segment_attention

Rows = tuple[
    Tensor, tuple[int, ...]
]  # the indices of real tokens, and where each row of a batch ends among them
last: dict[str, Any] = {"mask": None}  # of the forward that runs


def real_rows(attention_mask: Tensor) -> Rows:
    """Return which tokens of a mask, (B, L), are real."""
    if last["mask"] is not attention_mask:
        ends = torch.cat([attention_mask.new_zeros(1), attention_mask.sum(1).cumsum(0)]).tolist()
        index = attention_mask.flatten().nonzero().squeeze(1)
        last.update(mask=attention_mask, rows=(index, tuple(map(int, ends))))
    rows: Rows = last["rows"]
    return rows


def unpadded_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return the attention of query, (B, heads, L, D), as (B, L, heads, D)."""
    batch, heads, length, size = query.shape
    if attention_mask is None:
        attention_mask = torch.ones(batch, length, dtype=torch.bool, device=query.device)
    if torch.is_autocast_enabled(query.device.type):  # rotations leave fp32 queries beside bf16 values
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    index, ends = real_rows(attention_mask)
    query, key, value = (
        x.transpose(1, 2).reshape(batch * length, -1, size)[index].transpose(0, 1)
        for x in (query, key, value)
    )
    found = segment_attention(query, key, value, Segments(ends, ()), scaling or size**-0.5).transpose(0, 1)
    whole = found.new_zeros(batch * length, heads, size).index_copy(0, index, found)
    return whole.reshape(batch, length, heads, size), None


AttentionInterface.register("unpadded", unpadded_attention)
AttentionMaskInterface.register("unpadded", flash_attention_mask)
