"""Our attention, registered with transformers."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlt_lightning.numerics.attention import Segments, segment_attention

# The name of our attention as an attn_implementation.
SEGMENT_ATTENTION = "rlt_segments"


class PackedRow:
    """Carries the segments of a row through a model's forward.

    torch.compile would look into a tuple, and compile once per number of segments.
    """

    def __init__(self, segments: Segments) -> None:
        self.segments = segments


class RowCache(Protocol):
    """Keeps keys and values of rows that are sampled token by token (engines/slots.py)."""

    def attend(self, query: Tensor, layer: int, scale: float) -> Tensor:
        """Return the attention of each row's new token, (n, 1, A, D), from queries (n, A, 1, D)."""


def register_segment_attention() -> None:
    """Register our attention with transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(SEGMENT_ATTENTION, packed_attention)
    AttentionMaskInterface.register(SEGMENT_ATTENTION, sdpa_mask)


# torch.compile would trace the kernel once per number of segments; around it, one graph serves all rows.
@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed_row: PackedRow | None = None,
    slots: RowCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within segments and to shared prefixes if a packed row is given, else like transformers' sdpa.

    Args:
        module: The attention layer.
        query: (batch, heads, L, D); with a packed row the batch is 1.
        key: (batch, key heads, L, D).
        value: (batch, key heads, L, D).
        attention_mask: Not read where a packed row is given.
        scaling: Multiplies the products of queries and keys; None: D ** -0.5.
        packed_row: Passed on by the model's forward as a keyword argument.
        slots: Passed on likewise: the cache of rows that are sampled, one new token each.
        kwargs: Whatever else transformers passes, for sdpa.

    Returns:
        (batch, L, heads, D), and None for the attention weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if slots is not None:
        return slots.attend(query, module.layer_idx, scale), None  # type: ignore[arg-type]
    if packed_row is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    # Under autocast rotations leave fp32 queries beside bf16 values.
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    output = segment_attention(query[0], key[0], value[0], packed_row.segments, scale)  # (heads, L, D)
    return output.transpose(0, 1).unsqueeze(0), None
