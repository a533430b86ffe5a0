"""Slow versions of the fused kernels' interfaces, and tiny models and rows to run them on."""

from __future__ import annotations

import importlib.machinery
import itertools
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, library
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlt_lightning.models.attention import SEGMENT_ATTENTION, register_segment_attention
from rlt_lightning.numerics.attention import Segments, SharedPrefix
from rlt_lightning.numerics.packing import PackedSequences, ScoredSequence
from rlt_lightning.numerics.varlen import FlashAttnKernel

CPU = torch.device("cpu")
SEGMENTS = Segments((0, 5, 12, 15, 20, 30, 31, 40), (SharedPrefix(5, 12, 20), SharedPrefix(20, 30, 40)))


def tiny_qwen(num_layers: int = 2, **options: Any) -> Any:
    register_segment_attention()
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": num_layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = Qwen2Config(**sizes | heads | options, initializer_range=0.2)
    config._attn_implementation = SEGMENT_ATTENTION
    return Qwen2ForCausalLM(config)


def row(lengths: tuple[int, ...] = (7, 4, 9)) -> PackedSequences:
    """Continuations of one prefix of five tokens."""
    numbers = torch.Generator().manual_seed(0)
    prefix, *rests = (torch.randint(64, (n,), generator=numbers).tolist() for n in (5, *lengths))
    sequences = [ScoredSequence(prefix, rest, [False] * 5 + [True] * len(rest)) for rest in rests]
    return PackedSequences.from_sequences(sequences, (tuple(range(len(rests))),))


class SlowFlashAttn(types.ModuleType):
    """What flash_attn.flash_attn_interface computes, range by range and head by head; `error` spoils it."""

    def __init__(self, error: float = 0.0) -> None:
        super().__init__("flash_attn.flash_attn_interface")
        self.error = error

    def ranges(self, q_ends: Tensor, k_ends: Tensor, *longest: int) -> list[tuple[slice, slice]]:
        assert q_ends.dtype == k_ends.dtype == torch.int32
        spans = [
            [slice(start, end) for start, end in itertools.pairwise(ends)]
            for ends in (q_ends.tolist(), k_ends.tolist())
        ]
        assert list(longest) == [max(s.stop - s.start for s in side) for side in spans]
        return list(zip(*spans, strict=True))

    def scores(self, q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
        scores = scale * q @ k.T
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1) if causal else torch.zeros_like(scores) > 1
        return scores.masked_fill(hidden, -torch.inf)

    def _wrapped_flash_attn_varlen_forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, q_longest: int, k_longest: int,
        dropout_p: float, softmax_scale: float, causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        assert dropout_p == 0.0
        output, lse = torch.zeros_like(q), torch.zeros(q.shape[1], len(q), dtype=q.dtype)
        for queries, keys in self.ranges(q_ends, k_ends, q_longest, k_longest):
            for head in range(q.shape[1]):
                served = head // (q.shape[1] // k.shape[1])
                scores = self.scores(q[queries, head], k[keys, served], causal, softmax_scale)
                output[queries, head] = scores.softmax(1) @ v[keys, served]
                lse[head, queries] = scores.logsumexp(1) + self.error
        return output, lse, q.new_empty(0), q.new_empty(0)

    def _wrapped_flash_attn_varlen_backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, dq: Tensor, dk: Tensor,
        dv: Tensor, q_ends: Tensor, k_ends: Tensor, q_longest: int, k_longest: int, dropout_p: float,
        softmax_scale: float, causal: bool, **options: Any,
    ) -> Tensor:  # fmt: skip
        assert dropout_p == 0.0
        assert set(options) == {
            "window_size_left", "window_size_right", "softcap", "alibi_slopes", "deterministic"
        }  # fmt: skip
        for gradient in (dq, dk, dv):
            gradient.zero_()
        delta = (g * o).sum(-1)  # (tokens, heads)
        for queries, keys in self.ranges(q_ends, k_ends, q_longest, k_longest):
            for head in range(q.shape[1]):
                served = head // (q.shape[1] // k.shape[1])
                scores = self.scores(q[queries, head], k[keys, served], causal, softmax_scale)
                p = (scores - lse[head, queries, None]).exp()
                dv[keys, served] += p.T @ g[queries, head]
                ds = softmax_scale * p * (g[queries, head] @ v[keys, served].T - delta[queries, head, None])
                dq[queries, head] += ds @ k[keys, served]
                dk[keys, served] += ds.T @ q[queries, head]
        return delta


class SlowOwnKernels:
    """Stands in for PyTorch's flash attention on a CPU, as FlashAttention-3 does on a GPU, until removed."""

    def __init__(self, error: float = 0.0) -> None:
        self.slow = SlowFlashAttn(error)
        self.overrides = library.Library("aten", "IMPL", "CPU")
        self.overrides.impl("_flash_attention_forward", self.forward)
        self.overrides.impl("_flash_attention_backward", self.backward)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, q_longest: int, k_longest: int,
        dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        limits = q_ends, k_ends, q_longest, k_longest
        output, lse, *_ = self.slow._wrapped_flash_attn_varlen_forward(
            q, k, v, *limits, dropout_p, scale, is_causal
        )
        return output, lse, torch.empty(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)

    def backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, q_ends: Tensor,
        k_ends: Tensor, q_longest: int, k_longest: int, dropout_p: float, is_causal: bool, rng_state: Tensor,
        unused: Tensor, *, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        found = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self.slow._wrapped_flash_attn_varlen_backward(
            g, q, k, v, o, lse, *found, q_ends, k_ends, q_longest, k_longest, dropout_p, scale, is_causal,
            window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False,
        )  # fmt: skip
        return found

    def remove(self) -> None:
        self.overrides._destroy()


class AnyType(FlashAttnKernel):
    """In float64, so that nothing but our use of the interface makes a difference."""

    def supports(self, dtype: torch.dtype, size: int) -> bool:
        return True


def random_heads(size: int = 8) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(n, 40, size, dtype=torch.float64, requires_grad=True) for n in (6, 2, 2))


def install(monkeypatch: pytest.MonkeyPatch, name: str, module: types.ModuleType | None = None) -> None:
    """Make a package importable."""
    module = module or types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, module)


def liger(monkeypatch: pytest.MonkeyPatch, error: float = 0.0) -> None:
    """A package that leaves a model as it is, or scales what its last norm returns."""
    package: Any = types.ModuleType("liger_kernel.transformers")

    def apply(model: Any, fused_linear_cross_entropy: bool) -> None:
        assert not fused_linear_cross_entropy
        model.model.norm.weight.data *= 1 + error

    package.apply_liger_kernel_to_qwen2 = apply
    install(monkeypatch, "liger_kernel")
    install(monkeypatch, "liger_kernel.transformers", package)
