"""Operators that only a GPU has, written out for the CPU, with the types that the GPU's kernels take."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
LIBRARY = torch.library.Library("aten", "IMPL", "CPU")


def addmm_dtype(
    added: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Multiply in half precision and return fp32."""
    if a.dtype != b.dtype or a.dtype not in HALF or out_dtype != torch.float32:
        raise RuntimeError(f"addmm takes half precision and returns float32, not {a.dtype}, {out_dtype}")
    if added.dtype not in (a.dtype, out_dtype):
        raise RuntimeError("self dtype must match either out_dtype or mat1 dtype")
    return torch.addmm(added.float(), a.float(), b.float(), beta=beta, alpha=alpha)


def addmm_dtype_out(
    added: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor, **factors: float
) -> Tensor:
    """Do the same, into a tensor that is there."""
    if out.dtype != out_dtype:
        raise RuntimeError("out_dtype must be the same as the dtype of the provided out tensor")
    return out.copy_(addmm_dtype(added, a, b, out_dtype, **factors))


def require_flash(q: Tensor, q_ends: Tensor, k_ends: Tensor) -> None:
    """Check types and head size as the flash kernels do."""
    if q.dtype not in HALF:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if not q_ends.dtype == k_ends.dtype == torch.int32:
        raise RuntimeError("cu_seqlens_q must have dtype int32")
    if q.shape[-1] % 8:
        raise RuntimeError("head_size must be a multiple of 8")


def factor(q: Tensor, scale: float | None) -> float:
    """Return what scores are multiplied by."""
    return q.shape[-1] ** -0.5 if scale is None else scale


def scores(q: Tensor, k: Tensor, scale: float | None, causal: bool) -> Tensor:
    """Return the scores of one sequence, (heads, Q, K); the last query sees the last key."""
    found = torch.einsum("qhd,khd->hqk", q, k) * factor(q, scale)
    if causal:
        hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1 + len(k) - len(q))
        found = found.masked_fill(hidden, -torch.inf)
    return found


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ends: Tensor,
    k_ends: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float | None = None,
    **_: Any,
) -> tuple[Tensor, ...]:
    """Compute attention of sequences, (tokens, heads, D), with its log-sum-exps, (heads, tokens)."""
    require_flash(q, q_ends, k_ends)
    output, sums = torch.zeros_like(q), torch.zeros(q.shape[1], len(q), device=q.device)
    repeat = q.shape[1] // k.shape[1]
    for (a, b), (c, d) in zip(pairwise(q_ends.tolist()), pairwise(k_ends.tolist()), strict=True):
        if b - a > max_q or d - c > max_k:
            raise RuntimeError("a sequence is longer than max_seqlen")
        if a < b:
            keys, values = (x[c:d].float().repeat_interleave(repeat, 1) for x in (k, v))
            found = scores(q[a:b].float(), keys, scale, causal)
            sums[:, a:b] = found.logsumexp(-1)
            output[a:b] = torch.einsum("hqk,khd->qhd", found.softmax(-1), values).to(q.dtype)
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    return output, sums, state, torch.empty((), dtype=torch.uint64, device=q.device), sums.new_empty(0)


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sums: Tensor,
    q_ends: Tensor,
    k_ends: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    **_: Any,
) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values."""
    require_flash(q, q_ends, k_ends)
    if sums.dtype != torch.float32 or sums.shape != (q.shape[1], len(q)) or not sums.is_contiguous():
        raise RuntimeError("the log-sum-exps must be contiguous, float32, (heads, tokens)")
    grad_q, grad_k, grad_v = (torch.zeros(x.shape, device=q.device) for x in (q, k, v))
    repeat = q.shape[1] // k.shape[1]
    delta = (grad.float() * output.float()).sum(-1)
    for (a, b), (c, d) in zip(pairwise(q_ends.tolist()), pairwise(k_ends.tolist()), strict=True):
        if a < b:
            keys, values = (x[c:d].float().repeat_interleave(repeat, 1) for x in (k, v))
            weights = (scores(q[a:b].float(), keys, scale, causal) - sums[:, a:b, None]).exp()
            of_weights = torch.einsum("qhd,khd->hqk", grad[a:b].float(), values)
            of_scores = weights * (of_weights - delta[a:b].T[..., None]) * factor(q, scale)
            grad_q[a:b] += torch.einsum("hqk,khd->qhd", of_scores, keys)
            of_keys = torch.einsum("hqk,qhd->khd", of_scores, q[a:b].float())
            of_values = torch.einsum("hqk,qhd->khd", weights, grad[a:b].float())
            grad_k[c:d] += of_keys.unflatten(1, (-1, repeat)).sum(2)
            grad_v[c:d] += of_values.unflatten(1, (-1, repeat)).sum(2)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


LIBRARY.impl("addmm.dtype", addmm_dtype)
LIBRARY.impl("addmm.dtype_out", addmm_dtype_out)
LIBRARY.impl("_flash_attention_forward", flash_forward)
LIBRARY.impl("_flash_attention_backward", flash_backward)
