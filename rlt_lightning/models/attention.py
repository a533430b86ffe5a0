"""Our attention, registered with transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlt_lightning.numerics.attention import Segments, segment_attention

# The name of our attention as an attn_implementation.
SEGMENT_ATTENTION = "rlt_segments"


def register_segment_attention() -> None:
    """Register our attention with transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(SEGMENT_ATTENTION, packed_attention)
    AttentionMaskInterface.register(SEGMENT_ATTENTION, sdpa_mask)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within segments and to shared prefixes if segments are given, else like transformers' sdpa.

    Args:
        module: The attention layer.
        query: (batch, heads, L, D); with segments the batch is 1.
        key: (batch, key heads, L, D).
        value: (batch, key heads, L, D).
        attention_mask: Not read where segments are given.
        scaling: Multiplies the products of queries and keys; None: D ** -0.5.
        segments: Passed on by the model's forward as a keyword argument.
        kwargs: Whatever else transformers passes, for sdpa.

    Returns:
        (batch, L, heads, D), and None for the attention weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Under autocast rotations leave fp32 queries beside bf16 values.
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    output = segment_attention(query[0], key[0], value[0], segments, scale)  # (heads, L, D)
    return output.transpose(0, 1).unsqueeze(0), None
