"""Attention within the segments of a packed row, some of which continue a prefix that they share.

Every segment attends to itself, causally. A segment that continues a prefix attends to all of the prefix too.
Its two parts are computed apart and merged by their log-sum-exps, so that a prefix is stored once, nothing is
copied or repeated, and no L x L mask exists. The backward pass of an attention kernel needs only the queries,
keys and values of a part and the log-sum-exp of the whole, so each part's gradient is exact.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention


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


def segment_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Return causal attention within segments and from segments to the prefix that they continue.

    A CPU and, in half precision, an NVIDIA GPU use `MergedAttention`; others the slow and obvious
    `looped_attention`.

    Args:
        query: (A, L, D): A heads of D dimensions, any strides.
        key: (B, L, D), where A is a multiple of B: each key head serves A / B neighbouring query heads.
        value: (B, L, D).
        segments: The segments of the row.
        scale: Multiplies the products of queries and keys, usually D ** -0.5.

    Returns:
        (A, L, D), of the queries' type, with gradient.
    """
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    if query.device.type == "cpu":
        return MergedAttention.apply(query, key, value, segments, scale, LoopKernel())
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256:
        return MergedAttention.apply(query, key, value, segments, scale, VarlenKernel())
    return looped_attention(query, key, value, segments, scale)


def looped_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Compute `segment_attention` segment by segment with PyTorch's public attention, on any device."""
    key = key.repeat_interleave(len(query) // len(key), dim=0)
    value = value.repeat_interleave(len(query) // len(value), dim=0)
    outputs = []
    for start, end in pairwise(segments.boundaries):
        own = [slice(start, end)]
        prefix = [slice(s.start, s.split) for s in segments.shared if s.split <= start < s.end]
        keys, values = (torch.cat([t[:, part] for part in prefix + own], dim=1) for t in (key, value))
        mask = torch.ones(end - start, keys.shape[1], dtype=torch.bool, device=query.device)
        mask = mask.tril(keys.shape[1] - (end - start))
        args = query[None, :, start:end], keys[None], values[None], mask
        outputs.append(scaled_dot_product_attention(*args, scale=scale)[0])
    return torch.cat(outputs, dim=1)


class Part(NamedTuple):
    """Pairs of query and key ranges that attend to each other: both lists have one entry per pair."""

    queries: list[tuple[int, int]]
    keys: list[tuple[int, int]]
    causal: bool


def parts(segments: Segments) -> list[Part]:
    """Divide the row's attention: every segment with itself, and continuations with their prefix."""
    own = list(pairwise(segments.boundaries))
    continued = [(s.split, s.end) for s in segments.shared]
    prefixes = [(s.start, s.split) for s in segments.shared]
    return [Part(own, own, causal=True)] + ([Part(continued, prefixes, causal=False)] if prefixes else [])


class Kernel(Protocol):
    """Attention of one part, forward and backward. Tensors are (heads, L, D), log-sum-exps (heads, L)."""

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
        own, *continued = parts(segments)
        output, lse = kernel.forward(query, key, value, own, scale)
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


class VarlenKernel:
    """PyTorch's variable-length flash attention on an NVIDIA GPU: all ranges of a part in one launch."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        q, k, v = inputs_of(part, query, key, value)
        limits = varlen_limits(part, query.device)
        found, found_lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *limits, 0.0, part.causal, False, scale=scale
        )
        output = undo_pick(found, part.queries, query)
        lse = found_lse.new_empty(query.shape[:2])
        put_ranges(lse.t(), part.queries, found_lse.t())
        return output, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor,
        part: Part, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See `Kernel`."""
        q, k, v = inputs_of(part, query, key, value)
        g, o = pick_ranges(grad, part.queries), pick_ranges(output, part.queries)
        own_lse = torch.cat([lse[:, start:end] for start, end in part.queries], dim=1).contiguous()
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
        found = torch.ops.aten._flash_attention_backward(
            g, q, k, v, o, own_lse, *varlen_limits(part, query.device), 0.0, part.causal,
            no_dropout, no_dropout.new_empty(0), scale=scale,
        )  # fmt: skip
        like = zip(found, part_ranges(part), (query, key, value), strict=True)
        return tuple(undo_pick(gradient, ranges, tensor) for gradient, ranges, tensor in like)  # type: ignore[return-value]


def part_ranges(part: Part) -> tuple[list[tuple[int, int]], ...]:
    """Return the ranges of queries, keys and values."""
    return part.queries, part.keys, part.keys


def inputs_of(part: Part, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Return the part's queries, keys and values."""
    pairs = zip((query, key, value), part_ranges(part), strict=True)
    return tuple(pick_ranges(tensor, ranges) for tensor, ranges in pairs)


def pick_ranges(tensor: Tensor, ranges: list[tuple[int, int]]) -> Tensor:
    """Return the tokens in the ranges, as the varlen kernel takes them: (tokens, heads, D)."""
    rows = tensor.transpose(0, 1)
    if covers_all(ranges, rows):
        return rows.contiguous()
    return torch.cat([rows[start:end] for start, end in ranges])


def undo_pick(rows: Tensor, ranges: list[tuple[int, int]], like: Tensor) -> Tensor:
    """Undo `pick_ranges`, with zeros outside the ranges: (tokens, heads, D) -> (heads, L, D)."""
    if covers_all(ranges, rows) and len(rows) == like.shape[1]:
        return rows.transpose(0, 1)
    target = rows.new_zeros(like.shape[1], like.shape[0], like.shape[2])
    put_ranges(target, ranges, rows)
    return target.transpose(0, 1)


def covers_all(ranges: list[tuple[int, int]], rows: Tensor) -> bool:
    """Return whether the ranges cover all rows in order, so that nothing needs to be moved."""
    joined = all(before[1] == after[0] for before, after in pairwise(ranges))
    return joined and ranges[0][0] == 0 and ranges[-1][1] == len(rows)


def put_ranges(target: Tensor, ranges: list[tuple[int, int]], rows: Tensor) -> None:
    """Copy rows, which hold the ranges one after another, into the ranges of the target."""
    sizes = [end - start for start, end in ranges]
    for (start, end), piece in zip(ranges, rows.split(sizes), strict=True):
        target[start:end] = piece


def varlen_limits(part: Part, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Return cumulative lengths of the queries' and keys' ranges, int32, and the longest of each."""
    lengths = [[end - start for start, end in ranges] for ranges in (part.queries, part.keys)]
    q_ends, k_ends = (
        torch.tensor([0, *part_lengths], device=device).cumsum(0).to(torch.int32) for part_lengths in lengths
    )
    return q_ends, k_ends, max(lengths[0]), max(lengths[1])
