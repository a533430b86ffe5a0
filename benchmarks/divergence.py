"""The losses of on-policy distillation and their backward: blocks of the vocabulary against full logits.

    .venv/bin/python benchmarks/divergence.py [--tokens 1024] [--words 152064] [--hidden 896] [--rounds 3]

Goals are for the default sizes: two heads of Qwen2.5-0.5B in fp32, of which one learns. The other side is
`divergence`, plain PyTorch on both heads' full logits. The memory is what the loss needs besides weights and
hidden states; for both sides 0.51 GiB of it are the gradient of the student's weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from side_by_side import alternate, bars, benchmark_parser, finish, measure, read_options
from torch import Tensor

from rlt_lightning.numerics import Divergence
from rlt_lightning.numerics.divergence import divergence, linear_divergence
from rlt_lightning.numerics.head import Head

MEMORY_GOAL, TIME_GOAL = 1 / 4, 1.5
LOSSES = {"reverse": Divergence(), "jsd": Divergence("jsd")}


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=3)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--words", type=int, default=152064)
    parser.add_argument("--hidden", type=int, default=896)
    options = read_options(parser, tokens=64, words=3000, hidden=32)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hidden, teacher_hidden = torch.randn(2, options.tokens, options.hidden, device=device).unbind()
    weight, teacher_weight = 0.05 * torch.randn(2, options.words, options.hidden, device=device)
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    upstream = torch.randn(options.tokens, device=device)
    sums: dict[str, Tensor] = {}

    def full_logits(loss: Divergence) -> Tensor:
        with torch.no_grad():
            teacher_logits = teacher_hidden @ teacher_weight.t()
        return divergence(hidden @ weight.t(), teacher_logits, loss)

    def in_blocks(loss: Divergence) -> Tensor:
        return linear_divergence(hidden, Head(weight), teacher_hidden, Head(teacher_weight), loss)

    def side(name: str, function: Callable[[Divergence], Tensor]) -> Callable[[], dict[str, float]]:
        def run() -> None:
            values = function(LOSSES[name.split()[0]])
            values.backward(upstream)
            assert hidden.grad is not None
            assert weight.grad is not None
            sums[name] = torch.cat([values.detach(), hidden.grad.norm()[None], weight.grad.norm()[None]])

        def once() -> dict[str, float]:
            hidden.grad = weight.grad = None
            return measure(run, device)

        return once

    ways = {"full logits": full_logits, "blocks": in_blocks}
    sides = {f"{name} {way}": side(f"{name} {way}", ways[way]) for name in LOSSES for way in ways}
    results: dict[str, Any] = alternate(sides, options.rounds)
    figures: dict[str, float] = {}
    for name in LOSSES:
        full, blocks = results[f"{name} full logits"], results[f"{name} blocks"]
        torch.testing.assert_close(sums[f"{name} blocks"], sums[f"{name} full logits"], atol=1e-4, rtol=1e-4)
        figures[f"{name}_time"] = blocks["seconds"] / full["seconds"]
        figures[f"{name}_memory"] = blocks["peak_bytes"] / max(1, full["peak_bytes"])
    gib = {name.replace(" ", "\n"): result["peak_bytes"] / 2**30 for name, result in results.items()}
    seconds = {name.replace(" ", "\n"): result["seconds"] for name, result in results.items()}
    title = f"divergence + backward, {options.tokens} tokens, {options.words} words, {device.type}"
    sizes = {"tokens": options.tokens, "words": options.words, "hidden": options.hidden}
    finish(
        options.output,
        sizes | results,
        lambda: bars(options.output, title, {"seconds": seconds, "peak memory, GiB": gib}),
        **figures,
        time_goal=TIME_GOAL,
        memory_goal=MEMORY_GOAL,
    )


if __name__ == "__main__":
    main()
