"""Measure rates with nothing else on the GPU: its limits, phases by shape and option, the head, attention.

SECONDS bounds the whole. What an earlier call measured is left out, so a second call continues the first.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu
import torch
from common import DEVICE, HALF, ON_CPU, TINY, Finding, attempt, distance, median_seconds, note
from findings import measured_before
from torch import Tensor

from rlt_lightning.models.kernels import Kernels
from rlt_lightning.models.lora import LoRA
from rlt_lightning.models.packed import HeadOptions
from rlt_lightning.modules.phases import forward_flops, matmul_rate
from rlt_lightning.numerics.attention import Segments, SharedPrefix, segment_attention
from rlt_lightning.numerics.head import Head, LogitScale
from rlt_lightning.numerics.log_probs import linear_log_probs
from rlt_lightning.types import first_line

TOKENS = 256 if TINY else 16384
GIB = 2**30
OTHERS = (
    "FlexAttention",
    "torch's varlen",
    "Liger's",
    "cut-cross-entropy",
    "compiled blocks",
)


def peak_gib() -> float:
    return 0.0 if ON_CPU else torch.cuda.max_memory_allocated() / GIB


def free() -> None:
    """Return the memory of what was measured, and count its peak anew."""
    gc.collect()
    if not ON_CPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def ceilings() -> Finding:
    """Measure the two ceilings: matrix products, and a large copy, bytes read and written."""
    source = torch.randn(2**20 if TINY else 2**30, device=DEVICE, dtype=HALF)
    target = torch.empty_like(source)
    copy_gb_s = 2 * source.nbytes / median_seconds(partial(target.copy_, source)) / 1e9
    return None, {"tflops": matmul_rate(DEVICE, HALF) / 1e12, "copy_gb_s": copy_gb_s}


def phases(shape: str, checkpointing: bool, liger: bool, mixed: bool, lora: bool, compiled: bool) -> Finding:
    """Time the optimise and the score phase of 16k tokens; MFU is against the measured rate of products."""
    kernels = Kernels(liger=liger and not ON_CPU, compiled_blocks=compiled)
    adapter = LoRA() if lora else None
    group = gpu.Group(
        gpu.SHAPES[shape], TOKENS, checkpointing, DEVICE, kernels, HeadOptions(), mixed, adapter
    )
    free()  # the peak of the checks at the start does not count
    start = time.monotonic()
    group.optimise()
    first_s = time.monotonic() - start
    optimise_s = median_seconds(group.optimise, 3, 1)
    fields = {"optimise_s": optimise_s, "peak_gib": peak_gib(), "first_s": first_s}
    score_s = median_seconds(group.score, 3, 1)
    peak = matmul_rate(DEVICE, HALF)
    return None, fields | {
        "mfu": group.optimise_flops() / optimise_s / peak,
        "score_s": score_s,
        "score_mfu": forward_flops(group.policy, group.packed) / score_s / peak,
        "kernels": group.kernels,
        "options": {
            "shape": shape, "checkpointing": checkpointing, "liger": liger, "mixed": mixed, "lora": lora,
            "compiled": compiled,
        },
    }  # fmt: skip


def head(hidden_size: int, how: str) -> Finding:
    """Time the head's loss, forward and backward; its rate counts three products, however many there are."""
    torch.manual_seed(0)
    words = 2000 if TINY else 151936
    hidden = torch.randn(TOKENS, hidden_size, device=DEVICE, dtype=HALF, requires_grad=True)
    weight = (torch.randn(words, hidden_size, device=DEVICE, dtype=HALF) * 0.02).requires_grad_()
    targets = torch.randint(words, (TOKENS,), device=DEVICE)

    def ours(compiled: bool) -> Tensor:
        return linear_log_probs(hidden, Head(weight, None, LogitScale(0.7)), targets, None, compiled, True)[
            0
        ].sum()

    def liger() -> Tensor:
        library = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
        return library.LigerFusedLinearCrossEntropyLoss()(weight, hidden, targets)

    def cut_cross_entropy() -> Tensor:
        library = importlib.import_module("cut_cross_entropy")
        return library.linear_cross_entropy(hidden, weight, targets, reduction="none").sum()

    losses: dict[str, Callable[[], Tensor]] = {
        "ours": partial(ours, False),
        "ours, compiled": partial(ours, True),
        "Liger's": liger,
        "cut-cross-entropy": cut_cross_entropy,
    }

    def step() -> None:
        hidden.grad = weight.grad = None
        losses[how]().backward()

    with torch.no_grad():
        forward = median_seconds(losses[how], 3, 1) if how.startswith("ours") else None
    both = median_seconds(step, 3, 1)
    product = 2 * TOKENS * words * hidden_size
    fields = {"ms": both * 1e3, "tflops": 3 * product / both / 1e12, "peak_gib": peak_gib()}
    return None, fields | ({"forward_ms": forward * 1e3} if forward else {})


def attention(heads: int, key_heads: int, size: int, shared: bool, how: str) -> Finding:
    """Time attention of 16 segments, behind a prefix that they share or each by itself.

    A result that differs from ours is not timed.
    """
    torch.manual_seed(0)
    prefix = TOKENS // 8
    length = (TOKENS - prefix) // 16
    end = prefix + 16 * length
    boundaries = (0, *range(prefix, end + 1, length))
    segments = Segments(boundaries, (SharedPrefix(0, prefix, end),) if shared else ())
    pairs = sum((b - a) * (b - a + 1) / 2 for a, b in itertools.pairwise(boundaries))
    pairs += prefix * (end - prefix) if shared else 0
    scale = size**-0.5
    rows = [
        torch.randn(end, n, size, device=DEVICE, dtype=HALF) for n in (heads, key_heads, key_heads, heads)
    ]
    query, key, value = (row.transpose(0, 1).requires_grad_() for row in rows[:3])  # (heads, L, D)
    direction = rows[3].transpose(0, 1)

    def ours() -> Tensor:
        return segment_attention(query, key, value, segments, scale)

    def flex() -> Any:
        found = attend(query[None], key[None], value[None], block_mask=mask, scale=scale, enable_gqa=True)
        return found[0]

    def varlen() -> Any:
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        found = varlen_attn(q, k, v, ends, ends, prefix, prefix, scale=scale, **causal)
        return found.transpose(0, 1)

    if how == "FlexAttention":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        numbers = torch.bucketize(
            torch.arange(end, device=DEVICE), torch.tensor(boundaries[1:-1], device=DEVICE), right=True
        )

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            own = (numbers[i] == numbers[j]) & (i >= j)
            return own | ((numbers[j] == 0) & (numbers[i] > 0)) if shared else own

        mask = create_block_mask(visible, None, None, end, end, device=str(DEVICE))
        attend: Any = flex_attention if ON_CPU else torch.compile(flex_attention)
    if how == "torch's varlen":
        from inspect import signature

        varlen_attn: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn

        ends = torch.tensor(boundaries, device=DEVICE, dtype=torch.int32)
        options = {"is_causal": True, "window_size": (-1, 0), "enable_gqa": True}
        known = signature(varlen_attn).parameters
        causal = {name: options[name] for name in ("window_size", "enable_gqa") if name in known}
        causal |= {} if "window_size" in known else {"is_causal": True}
    function = {"FlexAttention": flex, "torch's varlen": varlen}.get(how, ours)
    backward = not (ON_CPU and how == "FlexAttention")  # PyTorch has none for a CPU

    def results(function: Callable[[], Tensor]) -> list[Tensor]:
        with torch.set_grad_enabled(backward):
            found = function()
        gradients = torch.autograd.grad(found, (query, key, value), direction) if backward else ()
        return [found.detach(), *gradients]

    def both() -> None:
        torch.autograd.grad(function(), (query, key, value), direction)

    wanted = results(ours)
    error = max(distance(a, b) for a, b in zip(results(function), wanted, strict=True))
    if not error < 0.03:
        raise ValueError(f"it differs from ours by {error:.2g} of the largest number")
    with torch.no_grad():
        forward_s = median_seconds(function, 5, 2)
    both_s = median_seconds(both, 5, 2) if backward else None
    work = heads * size * pairs / 1e12
    fields = {"error": error, "forward_ms": forward_s * 1e3, "forward_tflops": 4 * work / forward_s}
    if both_s:
        fields |= {"both_ms": both_s * 1e3, "both_tflops": 14 * work / both_s}
    return None, fields


def candidate(check: Callable[[], Finding]) -> Finding:
    """Return what a check of another library's kernel finds; if it cannot serve us, that is no failure."""
    try:
        return check()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers and libraries have error classes of their own
        traceback.print_exc()
        return None, {"why": f"skipped: {type(error).__name__}: {first_line(error)}"}


def phase_checks() -> dict[str, tuple[str, Callable[[], Finding]]]:
    """Return the phases by a key; the key's words are shape, dtype and options."""
    checks: dict[str, tuple[str, Callable[[], Finding]]] = {}
    for shape, adapter in (
        (("tiny", True),) if TINY else (("qwen2.5-0.5b", False), ("qwen2.5-1.5b", False), ("7b", True))
    ):
        for mixed, liger, checkpointing in itertools.product((False, True), repeat=3):
            words = [shape + (" LoRA" if adapter else ""), "bf16-mixed" if mixed else "bf16"]
            words += ["Liger"] * liger + ["checkpointing"] * checkpointing
            step = partial(phases, shape, checkpointing, liger, mixed, adapter, False)
            checks[f"{shape} {mixed:d}{liger:d}{checkpointing:d}"] = f"phases, {', '.join(words)}", step
    if not TINY:
        compiled = partial(phases, "qwen2.5-0.5b", False, False, False, False, True)
        checks["compiled"] = "phases, qwen2.5-0.5b, bf16, compiled blocks", compiled
        full = partial(phases, "7b", True, True, False, False, False)
        checks["7b full"] = "phases, 7b, bf16, Liger, checkpointing", full
    return checks


def all_checks() -> dict[str, Callable[[], Finding]]:
    """Return the checks by name, the most valuable of a second first."""
    by_key = phase_checks()
    shapes = ((4, 2, 64),) if TINY else ((14, 2, 64), (28, 4, 128))
    ways = ["ours"] if ON_CPU else ["ours", "torch's varlen"]

    def attend(ways: list[str]) -> dict[str, Callable[[], Finding]]:
        return {
            f"attention {a}/{b} x {size}, {'shared prefix' if shared else 'segments'}, {how}": partial(
                attention, a, b, size, shared, how
            )
            for a, b, size in shapes
            for shared in (True, False)
            for how in ways
            if not (shared and how == "torch's varlen")
        }

    def phase(*keys: str) -> dict[str, Callable[[], Finding]]:
        return dict(by_key[key] for key in keys)

    def heads(*sizes: int) -> dict[str, Callable[[], Finding]]:
        ways = ("ours",) if ON_CPU else ("ours", "ours, compiled", "Liger's", "cut-cross-entropy")
        return {f"head {size}, {how}": partial(head, size, how) for size in sizes for how in ways}

    if TINY:
        return attend([*ways, "FlexAttention"]) | phase("tiny 001", "tiny 110") | heads(96)
    small = "qwen2.5-0.5b", "qwen2.5-1.5b"
    return (
        # Those that are predicted or that a run has, by shape; then the others.
        phase(f"{small[0]} 010", f"{small[0]} 001", f"{small[1]} 010", f"{small[1]} 001", "7b 111", "7b 101")
        | heads(896, 3584)
        | attend(ways)
        | phase(f"{small[0]} 110", f"{small[1]} 110", f"{small[0]} 101")
        | attend(["FlexAttention"])
        | phase(f"{small[1]} 101", "7b full", "7b 011")
        | phase(*(f"{shape} {key}" for shape in small for key in ("000", "100", "011", "111")))
        | phase("7b 110", "compiled")
    )


def main() -> None:
    end = time.monotonic() + float(sys.argv[1])
    attempt("ceilings", ceilings)  # of this call's card, which need not be the last call's
    before = measured_before()
    for name, check in all_checks().items():
        if name in before:
            continue
        if time.monotonic() > end:
            note(name, why="skipped: no time left")
            continue
        free()
        attempt(name, partial(candidate, check) if name.endswith(OTHERS) else check)
    free()


if __name__ == "__main__":
    main()
