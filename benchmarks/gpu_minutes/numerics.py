"""Compare results on CUDA with float64 on the CPU. An error is relative to the largest number."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import DEVICE, HALF, ON_CPU, TINY, Finding, attempt, distance
from torch import Tensor

from rlt_lightning.numerics import Divergence
from rlt_lightning.numerics.attention import Segments, SharedPrefix, looped_attention, segment_attention
from rlt_lightning.numerics.divergence import linear_divergence
from rlt_lightning.numerics.head import Head, LogitScale
from rlt_lightning.numerics.log_probs import linear_log_probs

WORDS = 3000 if TINY else 49152
LAYOUTS = {
    "one segment": Segments((0, 333)),
    "packed": Segments((0, 7, 135, 136, 400)),
    "one family": Segments((0, 130, 131, 300, 557), (SharedPrefix(0, 130, 557),)),
    "two families and a loner": Segments(
        (0, 64, 70, 199, 263, 520, 777, 800), (SharedPrefix(0, 64, 199), SharedPrefix(263, 520, 800))
    ),
    "64 completions": Segments(
        (0, *range(300, 300 + 37 * 64 + 1, 37)), (SharedPrefix(0, 300, 300 + 37 * 64),)
    ),
}
# Query heads, key heads, dimensions. PyTorch's flash attention has a backward for multiples of 8 only.
HEADS = ((8, 2, 64), (2, 2, 12)) if TINY else ((8, 2, 64), (28, 4, 128), (2, 1, 256), (3, 1, 80), (2, 2, 12))
Function = Callable[..., tuple[Tensor, ...]]


def compare(
    inputs: list[Tensor], ours: Function, wanted: Function, dtype: torch.dtype, bound: float
) -> Finding:
    """Compare outputs, and gradients of the first; both sides get the same rounded numbers."""
    sides = []
    for function, device, to in ((wanted, torch.device("cpu"), torch.float64), (ours, DEVICE, dtype)):
        given = [tensor.to(dtype).to(device, to).requires_grad_() for tensor in inputs]
        outputs = function(*given)
        direction = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(1))
        outputs[0].backward(direction.to(outputs[0]))
        sides.append([*outputs, *(tensor.grad for tensor in given if tensor.grad is not None)])
    errors = [distance(found, right) for right, found in zip(*sides, strict=True)]
    return max(errors) < bound, {"errors": errors, "bound": bound}


def attention(segments: Segments, heads: int, key_heads: int, size: int, dtype: torch.dtype) -> Finding:
    """Compare attention with a loop over segments."""
    torch.manual_seed(0)
    # (L, heads, D) in memory, as a model's projections make them.
    rows = [torch.randn(segments.boundaries[-1], n, size) for n in (heads, key_heads, key_heads)]

    def call(function: Any, *rows: Tensor) -> tuple[Tensor]:
        return (function(*(row.transpose(0, 1) for row in rows), segments, size**-0.5),)

    bound = 2e-5 if dtype == torch.float32 else 0.02
    return compare(rows, partial(call, segment_attention), partial(call, looped_attention), dtype, bound)


def log_probs(
    dtype: torch.dtype,
    num_tokens: int = 300,
    scale: LogitScale = LogitScale(0.7),
    bias: bool = False,
    compiled: bool = False,
    autocast: bool = False,
) -> Finding:
    """Compare log-probs and entropies of the head."""
    torch.manual_seed(0)
    inputs = [torch.randn(num_tokens, 96), torch.randn(WORDS, 96) * 0.1, *([torch.randn(WORDS)] * bias)]
    targets = torch.randint(WORDS, (num_tokens,))

    def call(ours: bool, states: Tensor, weight: Tensor, offset: Tensor | None = None) -> tuple[Tensor, ...]:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast and ours):
            head, words = Head(weight, offset, scale), targets.to(states.device)
            found, entropy = linear_log_probs(states, head, words, None, compiled and ours, True)
        assert entropy is not None
        return found, entropy

    bound = 2e-5 if dtype == torch.float32 and not autocast else 0.02
    return compare(inputs, partial(call, True), partial(call, False), dtype, bound)


def exact_kl(dtype: torch.dtype) -> Finding:
    """Compare the KL over the whole vocabulary, of heads of different sizes."""
    torch.manual_seed(0)
    inputs = [torch.randn(200, 64), torch.randn(WORDS - 128, 64) * 0.1]
    inputs += [torch.randn(200, 96), torch.randn(WORDS, 96) * 0.1]

    def call(q: Tensor, q_weight: Tensor, p: Tensor, p_weight: Tensor) -> tuple[Tensor]:
        heads = (Head(weight, None, LogitScale(0.7)) for weight in (q_weight, p_weight))
        return (linear_divergence(q, next(heads), p, next(heads), Divergence("forward")),)

    return compare(inputs, call, call, dtype, 5e-5 if dtype == torch.float32 else 0.03)


def main() -> None:
    checks: dict[str, Callable[[], Finding]] = {}
    for dtype in dict.fromkeys((HALF, torch.float32)):
        name = str(dtype)[6:]
        for layout, segments in LAYOUTS.items():
            for heads in HEADS:
                label = f"attention, {layout}, {heads[0]}/{heads[1]} heads of {heads[2]}, {name}"
                checks[label] = partial(attention, segments, *heads, dtype)
        checks[f"log-probs, {name}"] = partial(log_probs, dtype)
        checks[f"exact KL, {name}"] = partial(exact_kl, dtype)
    soft = LogitScale(0.7, 1.3, 30.0)
    checks["log-probs, bias, soft cap"] = partial(log_probs, HALF, scale=soft, bias=True)
    if not ON_CPU:
        checks["log-probs, several tiles"] = partial(log_probs, HALF, 8192)
        checks["log-probs, compiled"] = partial(log_probs, HALF, compiled=True)
        checks["log-probs under autocast"] = partial(log_probs, torch.float32, autocast=True)
    sys.exit(not all([attempt(name, function) for name, function in checks.items()]))


if __name__ == "__main__":
    main()
