"""Variable-length flash attention on an NVIDIA GPU: all ranges of a part in one launch.

PyTorch's kernels and those of the package flash-attn have the same interface: tokens of all ranges one
after another, and the cumulative lengths of the ranges. What differs is in `PackedKernel`'s two subclasses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlt_lightning.numerics.attention import KERNELS, Part
from rlt_lightning.numerics.transfers import upload

Ranges = tuple[tuple[int, int], ...]


class Limits(NamedTuple):
    """Where the ranges of a part begin and end, once they stand one after another."""

    q_ends: Tensor  # cumulative lengths of the queries' ranges from 0, int32
    k_ends: Tensor
    q_longest: int  # tokens
    k_longest: int


class PackedKernel(ABC):
    """A `Kernel` that computes all ranges of a part at once, in half precision."""

    name: str
    # The kernels read 16 bytes at a time.
    size_multiple = 8

    def supports(self, dtype: torch.dtype, size: int) -> bool:
        """See `Kernel`."""
        return dtype in (torch.bfloat16, torch.float16) and size <= 256

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, limits: Limits, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return output (tokens, A, D) and fp32 log-sum-exp (A, tokens)."""

    @abstractmethod
    def gradients(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
        limits: Limits, causal: bool, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return gradients of q, k and v, from the output and the log-sum-exp over all keys."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        q, k, v = select_inputs(part, query, key, value)
        found, found_lse = self.attend(q, k, v, varlen_limits(part, query.device), part.causal, scale)
        output = undo_pick(found, part.queries, query)
        if covers_all(part.queries, query.shape[1]):
            return output, found_lse
        lse = found_lse.new_empty(query.shape[:2])
        put_ranges(lse.t(), part.queries, found_lse.t())
        return output, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor,
        part: Part, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See `Kernel`."""
        q, k, v = select_inputs(part, query, key, value)
        g, o = pick_ranges(grad, part.queries), pick_ranges(output, part.queries)
        if not covers_all(part.queries, query.shape[1]):
            lse = torch.cat([lse[:, start:end] for start, end in part.queries], dim=1)
        limits = varlen_limits(part, query.device)
        found = self.gradients(g, q, k, v, o, lse.contiguous(), limits, part.causal, scale)
        like = zip(found, part_ranges(part), (query, key, value), strict=True)
        return tuple(undo_pick(gradient, ranges, tensor) for gradient, ranges, tensor in like)  # type: ignore[return-value]


class TorchKernel(PackedKernel):
    """PyTorch's kernels."""

    name = "PyTorch's variable-length flash attention"

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, limits: Limits, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `PackedKernel`."""
        output, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *limits, 0.0, causal, False, scale=scale
        )
        return output, lse

    def gradients(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
        limits: Limits, causal: bool, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """See `PackedKernel`."""
        # The random state is read only with dropout.
        no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)
        return torch.ops.aten._flash_attention_backward(
            g, q, k, v, o, lse, *limits, 0.0, causal, no_dropout, no_dropout.new_empty(0), scale=scale
        )


class FlashAttnKernel(PackedKernel):
    """The kernels of the package flash-attn, version 2.8.

    Args:
        interface: Its module flash_attn.flash_attn_interface.
        name: The kernel's name in a run's log.
    """

    def __init__(self, interface: Any, name: str) -> None:
        self.interface = interface
        self.name = name

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, limits: Limits, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `PackedKernel`."""
        output, lse, *_ = self.interface._wrapped_flash_attn_varlen_forward(
            q, k, v, *limits, 0.0, scale, causal=causal
        )
        return output, lse

    def gradients(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
        limits: Limits, causal: bool, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """See `PackedKernel`."""
        found = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self.interface._wrapped_flash_attn_varlen_backward(
            g, q, k, v, o, lse, *found, *limits, 0.0, scale, causal,
            window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return found


KERNELS["cuda"] = TorchKernel()


def part_ranges(part: Part) -> tuple[Ranges, ...]:
    """Return the ranges of queries, keys and values."""
    return part.queries, part.keys, part.keys


def select_inputs(part: Part, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Return the part's queries, keys and values."""
    pairs = zip((query, key, value), part_ranges(part), strict=True)
    return tuple(pick_ranges(tensor, ranges) for tensor, ranges in pairs)


def pick_ranges(tensor: Tensor, ranges: Ranges) -> Tensor:
    """Return the tokens in the ranges, as the kernels take them: (tokens, heads, D)."""
    rows = tensor.transpose(0, 1)
    if covers_all(ranges, len(rows)):
        return rows.contiguous()
    return torch.cat([rows[start:end] for start, end in ranges])


def undo_pick(rows: Tensor, ranges: Ranges, like: Tensor) -> Tensor:
    """Undo `pick_ranges`, with zeros outside the ranges: (tokens, heads, D) -> (heads, L, D)."""
    if covers_all(ranges, like.shape[1]):
        return rows.transpose(0, 1)
    target = rows.new_zeros(like.shape[1], like.shape[0], like.shape[2])
    put_ranges(target, ranges, rows)
    return target.transpose(0, 1)


@lru_cache(maxsize=64)
def covers_all(ranges: Ranges, num_tokens: int) -> bool:
    """Return whether the ranges cover all tokens of a row in order, so that nothing needs to be moved."""
    joined = all(before[1] == after[0] for before, after in pairwise(ranges))
    return joined and ranges[0][0] == 0 and ranges[-1][1] == num_tokens


def put_ranges(target: Tensor, ranges: Ranges, rows: Tensor) -> None:
    """Copy rows, which hold the ranges one after another, into the ranges of the target."""
    sizes = [end - start for start, end in ranges]
    for (start, end), piece in zip(ranges, rows.split(sizes), strict=True):
        target[start:end] = piece


@lru_cache(maxsize=64)
def varlen_limits(part: Part, device: torch.device) -> Limits:
    """Return the limits of a part; they are made once per row, not once per layer and pass."""
    lengths = [[end - start for start, end in ranges] for ranges in (part.queries, part.keys)]
    q_ends, k_ends = (upload([0, *accumulate(part_lengths)], device, torch.int32) for part_lengths in lengths)
    return Limits(q_ends, k_ends, max(lengths[0]), max(lengths[1]))
