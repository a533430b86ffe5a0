"""Attention for packed rows and for sampling with our cache, registered with transformers."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlt_lightning.numerics.attention import Segments, masked_attention, segment_attention

# The name of our attention as an attn_implementation.
SEGMENT_ATTENTION = "rlt_segments"
# What models pass to an attention function that changes no result, since we call them without dropout.
KNOWN_ARGUMENTS = {
    *("dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions"),
    *("output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep", "num_items_in_batch"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
}


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
    sliding_window: int | None = None,
    softcap: float | None = None,
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
        sliding_window: The tokens that a token attends to, itself included; masks hold it too.
        softcap: Bounds the scores; transformers' sdpa would leave it out.
        kwargs: Whatever else transformers passes, for sdpa.

    Returns:
        (batch, L, heads, D), and None for the attention weights.

    Raises:
        ValueError: If the model passes what would have to change the result, such as the keys that an indexer
            chose, or does not pass the window of a layer; or if our cache would have to know a window or cap.
    """
    given = {name for name, value in kwargs.items() if value is not None}
    if unknown := given - KNOWN_ARGUMENTS:
        raise ValueError(
            f"our attention does not know what the model passes to it: {', '.join(sorted(unknown))}"
        )
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if slots is not None and (sliding_window or softcap or has_window(module)):
        raise ValueError("our cache for sampling knows neither windows nor soft caps")
    if slots is not None:
        return slots.attend(query, module.layer_idx, scale), None  # type: ignore[arg-type]
    if packed_row is None and softcap:
        heads = query.shape[1] // key.shape[1]
        mask = attention_mask
        if mask is None:  # causal
            mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool)
            mask = mask.tril(key.shape[2] - query.shape[2])
        key, value = (t.repeat_interleave(heads, dim=1) for t in (key, value))
        return masked_attention(query, key, value, mask, scale, softcap).transpose(1, 2).contiguous(), None
    if packed_row is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    # Under autocast rotations leave fp32 queries beside bf16 values.
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if sliding_window is None and has_window(module):
        raise ValueError("the model does not pass a layer's sliding window to its attention")
    output = segment_attention(
        query[0], key[0], value[0], packed_row.segments, scale, sliding_window, softcap
    )  # (heads, L, D)
    # Some models view the result, which no kernel's output needs a copy for.
    return output.transpose(0, 1).contiguous().unsqueeze(0), None


def supports_sdpa(model_class: Any) -> bool:
    """Return whether transformers can compute a model's attention by PyTorch's function."""
    return bool(model_class._supports_sdpa)


def get_attention(model: Any) -> str:
    """Return the name of the function by which a model computes attention; transformers has no public way."""
    name: str = model.config._attn_implementation
    return name


def set_attention(model: Any, name: str) -> None:
    """Let a model compute attention by another function."""
    if get_attention(model) != name:
        model.set_attn_implementation(name)


def has_window(module: nn.Module) -> bool:
    """Return whether an attention layer sees only a window, as far as its configuration says."""
    config: Any = getattr(module, "config", None)
    if not getattr(config, "sliding_window", None):
        return False
    kinds = getattr(config, "layer_types", None)
    return kinds is None or kinds[module.layer_idx] == "sliding_attention"
