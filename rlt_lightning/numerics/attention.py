"""Attention within the segments of a packed row, some of which continue a prefix that they share.

Every segment attends to itself, causally. A segment that continues a prefix attends to all of the prefix too.
Its two parts are computed separately and merged by their log-sum-exps, so a prefix is stored once, nothing is
copied or repeated, and no L x L mask exists. The backward pass of an attention kernel needs only the queries,
keys and values of a part and the log-sum-exp of the whole, so each part's gradient is exact.

Layers that see only a window of the last tokens, where a sequence is longer, and layers that cap their scores
attend segment by segment, with a mask: a window reaches from a segment back into the prefix.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, scaled_dot_product_attention


class SharedPrefix(NamedTuple):
    """Places in the row: the prefix is start:split, the segments that continue it fill split:end."""

    start: int
    split: int
    end: int


class Segments(NamedTuple):
    """Where the segments of a row of L tokens begin and end, and which of them share a prefix."""

    # Ascending from 0 to L, one more than there are segments; no segment is empty.
    boundaries: tuple[int, ...]
    shared: tuple[SharedPrefix, ...] = ()


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return causal attention within segments and from segments to the prefix that they continue.

    A CPU and, in half precision, an NVIDIA GPU use `MergedAttention` with the device's kernel in `KERNELS`;
    others the slow and obvious `looped_attention`.

    Args:
        query: (A, L, D): A heads of D dimensions, any strides.
        key: (B, L, D), where A is a multiple of B: each key head serves A / B neighbouring query heads.
        value: (B, L, D).
        segments: The segments of the row.
        scale: Multiplies the products of queries and keys, usually D ** -0.5.
        window: How many tokens a token attends to, itself included; None: all before it.
        cap: Bounds the scores z softly, cap * tanh(z / cap); None: no bound.

    Returns:
        (A, L, D), of the queries' type, with gradient.
    """
    if cap is not None or (window is not None and window < longest_sequence(segments)):
        return looped_attention(query, key, value, segments, scale, window, cap)
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    kernel = KERNELS.get(query.device.type)
    size = query.shape[-1]
    if kernel is None or not kernel.supports(query.dtype, size):
        return looped_attention(query, key, value, segments, scale)
    if missing := -size % kernel.size_multiple:
        # Zeros add nothing to a product of query and key, and zero columns to the result.
        padded = (pad(tensor, (0, missing)) for tensor in (query, key, value))
        return MergedAttention.apply(*padded, segments, scale, kernel)[..., :size]
    return MergedAttention.apply(query, key, value, segments, scale, kernel)


def looped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Compute `segment_attention` segment by segment with PyTorch's public attention, on any device.

    With a window, so many queries at a time: then no mask is wider than two windows.
    """
    key = key.repeat_interleave(len(query) // len(key), dim=0)
    value = value.repeat_interleave(len(query) // len(value), dim=0)
    outputs = []
    for start, end in pairwise(segments.boundaries):
        prefix = [(s.start, s.split) for s in segments.shared if s.split <= start < s.end]
        reach = end if window is None else window - 1  # how far a token sees before itself
        for first in range(start, end, window or end - start):
            last = min(first + (window or end), end)
            seen = [(max(start, first - reach), last)]
            missing = reach - (first - seen[0][0])
            seen = [(max(a, b - missing), b) for a, b in prefix if missing > 0] + seen
            keys, values = (torch.cat([t[:, a:b] for a, b in seen], dim=1) for t in (key, value))
            before = keys.shape[1] - (last - first)
            mask = torch.ones(last - first, keys.shape[1], dtype=torch.bool, device=query.device)
            mask = mask.tril(before).triu(before - reach)
            outputs.append(masked_attention(query[:, first:last], keys, values, mask, scale, cap))
    return torch.cat(outputs, dim=1)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float | None
) -> Tensor:
    """Return attention where the mask is True, with or without a soft cap; all have the same heads."""
    if cap is None:
        inputs = query[None], key[None], value[None], mask
        return scaled_dot_product_attention(*inputs, scale=scale)[0]
    scores = cap * (query @ key.transpose(-1, -2) * (scale / cap)).tanh()
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    dtype = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(dim=-1, dtype=dtype).to(query.dtype) @ value


@lru_cache(maxsize=64)
def longest_sequence(segments: Segments) -> int:
    """Return the tokens of the longest sequence of a row, with its prefix."""
    lengths = [0]
    for start, end in pairwise(segments.boundaries):
        prefixes = [s.split - s.start for s in segments.shared if s.split <= start < s.end]
        lengths.append(end - start + sum(prefixes))
    return max(lengths)


class Part(NamedTuple):
    """Pairs of query and key ranges that attend to each other: both lists have one entry per pair."""

    queries: tuple[tuple[int, int], ...]
    keys: tuple[tuple[int, int], ...]
    causal: bool


@lru_cache(maxsize=64)
def parts(segments: Segments) -> tuple[Part, ...]:
    """Divide the row's attention: every segment with itself, and continuations with their prefix."""
    ranges = tuple(pairwise(segments.boundaries))
    continued = tuple((s.split, s.end) for s in segments.shared)
    prefixes = tuple((s.start, s.split) for s in segments.shared)
    first = Part(ranges, ranges, causal=True)
    return (first, Part(continued, prefixes, causal=False)) if prefixes else (first,)


class Kernel(Protocol):
    """Attention of one part, forward and backward. Tensors are (heads, L, D), log-sum-exps (heads, L)."""

    # What the kernel is called in a run's log.
    name: str
    # Sizes of heads are padded to a multiple of it.
    size_multiple: int

    def supports(self, dtype: torch.dtype, size: int) -> bool:
        """Return whether the kernel computes in this type, with heads of this size."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return output (A, L, D) and fp32 log-sum-exp (A, L), undefined outside the part's queries."""

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor,
        part: Part, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return gradients of query, key and value, zero outside the part; output and lse are the whole's."""


class MergedAttention(torch.autograd.Function):
    """See `segment_attention`."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, kernel: Kernel
    ) -> Tensor:
        """Compute every part and merge."""
        causal, *continued = parts(segments)
        output, lse = kernel.forward(query, key, value, causal, scale)
        for part in continued:
            other_output, other_lse = kernel.forward(query, key, value, part, scale)
            for start, end in part.queries:
                merge_(
                    output[:, start:end],
                    lse[:, start:end],
                    other_output[:, start:end],
                    other_lse[:, start:end],
                )
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.options = segments, scale, kernel
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Add up the parts' gradients."""
        query, key, value, output, lse = ctx.saved_tensors
        segments, scale, kernel = ctx.options
        first, *others = (
            kernel.backward(grad, query, key, value, output, lse, part, scale) for part in parts(segments)
        )
        for gradients in others:
            for total, gradient in zip(first, gradients, strict=True):
                total += gradient
        return (*first, None, None, None)


def merge_(output: Tensor, lse: Tensor, other_output: Tensor, other_lse: Tensor) -> None:
    """Add a part to the attention over other keys, in place: out = sum of out_i exp(lse_i - lse)."""
    total = torch.logaddexp(lse, other_lse)
    weight = (other_lse - total).exp().unsqueeze(-1).to(output.dtype)
    output.lerp_(other_output, weight)  # the two weights sum to 1
    lse.copy_(total)


class LoopKernel:
    """A CPU's flash attention, range by range."""

    name = "PyTorch's flash attention for CPUs"
    size_multiple = 1

    def supports(self, dtype: torch.dtype, size: int) -> bool:
        """See `Kernel`."""
        return True

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        # The layers around use (L, heads, D) in memory.
        rows = torch.empty_like(query.transpose(0, 1), memory_format=torch.contiguous_format)
        output = rows.transpose(0, 1)
        lse = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        for (q0, q1), (k0, k1) in zip(part.queries, part.keys, strict=True):
            output[:, q0:q1], lse[:, q0:q1] = (
                result[0]
                for result in torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    query[None, :, q0:q1],
                    key[None, :, k0:k1],
                    value[None, :, k0:k1],
                    0.0,
                    part.causal,
                    scale=scale,
                )
            )
        return output, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor,
        part: Part, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See `Kernel`."""
        gradients = tuple(torch.zeros_like(tensor) for tensor in (query, key, value))
        for (q0, q1), (k0, k1) in zip(part.queries, part.keys, strict=True):
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[None, :, q0:q1], query[None, :, q0:q1], key[None, :, k0:k1], value[None, :, k0:k1],
                output[None, :, q0:q1], lse[None, :, q0:q1], 0.0, part.causal, scale=scale,
            )  # fmt: skip
            for total, gradient, (start, end) in zip(
                gradients, found, ((q0, q1), (k0, k1), (k0, k1)), strict=True
            ):
                total[:, start:end] = gradient[0]
        return gradients  # type: ignore[return-value]


# The kernel of each type of device; `models.kernels` may choose another one at the start of a run.
KERNELS: dict[str, Kernel] = {"cpu": LoopKernel()}
