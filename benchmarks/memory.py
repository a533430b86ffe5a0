"""Log-probs and their backward: blocks of the vocabulary against full logits.

    .venv/bin/python benchmarks/memory.py [--tokens 8192] [--words 152064] [--hidden 896] [--rounds 5]

Goals are for the default sizes: the head of Qwen2.5-0.5B in fp32. The other side holds raw logits,
log-softmax, a gather, and their gradients, as plain PyTorch computes them: 14 GiB more than the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from side_by_side import alternate, bars, benchmark_parser, finish, measure, read_options
from torch import Tensor

from rlt_lightning.numerics.head import Head
from rlt_lightning.numerics.log_probs import linear_log_probs

MEMORY_GOAL, TIME_GOAL = 1 / 8, 1.05


def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return (hidden @ weight.t()).log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)


def in_blocks(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_log_probs(hidden, Head(weight), targets)[0]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--words", type=int, default=152064)
    parser.add_argument("--hidden", type=int, default=896)
    options = read_options(parser, tokens=64, words=3000, hidden=32)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hidden = torch.randn(options.tokens, options.hidden, device=device, requires_grad=True)
    weight = (0.02 * torch.randn(options.words, options.hidden, device=device)).requires_grad_()
    targets = torch.randint(options.words, (options.tokens,), device=device)
    upstream = torch.randn(options.tokens, device=device)
    sums: dict[str, Tensor] = {}

    def side(name: str, function: Callable[..., Tensor]) -> Callable[[], dict[str, float]]:
        def run() -> None:
            log_probs = function(hidden, weight, targets)
            log_probs.backward(upstream)
            sums[name] = torch.cat([log_probs.detach(), hidden.grad.norm()[None], weight.grad.norm()[None]])

        def once() -> dict[str, float]:
            hidden.grad = weight.grad = None
            return measure(run, device)

        return once

    sides: dict[str, Any] = {"full logits": side("full", full_logits), "blocks": side("blocks", in_blocks)}
    results: dict[str, Any] = alternate(sides, options.rounds)
    torch.testing.assert_close(sums["blocks"], sums["full"], atol=1e-4, rtol=1e-4)
    full, blocks = results["full logits"], results["blocks"]
    time_ratio = blocks["seconds"] / full["seconds"]
    memory_ratio = blocks["peak_bytes"] / max(1, full["peak_bytes"])
    gib = {name: result["peak_bytes"] / 2**30 for name, result in results.items()}
    seconds = {name: result["seconds"] for name, result in results.items()}
    title = f"log-probs + backward, {options.tokens} tokens, {options.words} words, {device.type}"
    sizes = {"tokens": options.tokens, "words": options.words, "hidden": options.hidden}
    finish(
        options.output,
        sizes | results,
        lambda: bars(options.output, title, {"seconds": seconds, "peak memory, GiB": gib}),
        time=time_ratio,
        time_goal=TIME_GOAL,
        memory=memory_ratio,
        memory_goal=MEMORY_GOAL,
    )


if __name__ == "__main__":
    main()
