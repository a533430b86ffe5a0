"""The head beside others; then benchmarks/optimise.py and reward.py beside TRL and a loop over samples.

    python peers.py SECONDS       which bounds the whole

A line for each side has its seconds, how far memory rises, and the tokens that it computes. Unfair to one
side: Liger's head and cut-cross-entropy return only the loss, TRL's (by Triton) and ours entropies too; TRL's
attention with a padding mask cannot use the flash kernel, so "unpadded attention" is a side of its own; one
prompt for 16 completions is the best case of a shared prefix; "ours" in a reward gets the engine's log-probs
free, and "ours, both forwards" is like for like; the loop has no Liger. All weights are random.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from common import DEVICE, HALF, ON_CPU, OUT, TINY, Finding, attempt, distance, make_model, note, time_call
from torch import Tensor

from rlt_lightning.modules.phases import peak_memory, reset_peak_memory
from rlt_lightning.numerics.head import Head
from rlt_lightning.numerics.log_probs import linear_log_probs

FOLDER = Path(__file__).parents[1]
# Script, shape and options, the most valuable of a second first. Completions have 300 to 1,500 tokens in an
# optimise phase and 1,000 in a reward; TRL takes 16 rows, or twice 8.
CASES: list[tuple[str, str, str]] = [
    ("optimise", "miniature", "--rows 8 --shortest 12 --length 60"),
    ("optimise", "qwen2.5-0.5b", "--precision bf16-true --gradient_checkpointing true"),
    ("optimise", "qwen2.5-0.5b", "--precision bf16-true --liger"),
    ("reward", "qwen2.5-0.5b", "--precision bf16-true --liger"),
    ("optimise", "qwen2.5-1.5b", "--precision bf16-true --liger --gradient_checkpointing true --rows 8"),
    ("optimise", "qwen2.5-0.5b", "--precision bf16-mixed --gradient_checkpointing true --rows 8"),
    ("reward", "qwen2.5-1.5b", "--precision bf16-true"),
    ("optimise", "qwen2.5-1.5b", "--precision bf16-true --liger --rows 8"),
]
REHEARSED = [("optimise", "miniature", "--tiny --rows 2 --shortest 4"), ("reward", "tiny", "--tiny")]


HEADS = [(128, 32, 500)] if TINY else [(16384, 896, 151936), (16384, 3584, 152064)]  # tokens, states, words
TRL_WORDS = 32768  # that it takes at a time by default
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def list_heads() -> dict[str, Loss]:
    """Return the heads that are installed: each takes states, weight and targets, and sums the log-probs."""
    from trl.kernels import ChunkedLogProbFunction

    def ours(compiled: bool, states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_log_probs(states, Head(weight), targets, None, compiled, with_entropy=True)[0].sum()

    def trl(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        options = (1.0, TRL_WORDS, None, 1.0, ("entropy",))
        log_probs: Tensor = ChunkedLogProbFunction.apply(states, weight, None, targets, *options)[0]
        return log_probs.sum()

    sides: dict[str, Loss] = {"ours": partial(ours, not ON_CPU), "TRL": trl}
    if not ON_CPU:
        sides["ours, not compiled"] = partial(ours, False)
    if not ON_CPU and find_spec("liger_kernel"):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as liger

        sides["Liger"] = lambda *inputs: -liger(*inputs, reduction="sum")
    if not ON_CPU and find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        sides["cut-cross-entropy"] = lambda *inputs: -linear_cross_entropy(*inputs, reduction="sum")
    return sides


def head(loss: Loss, tokens: int, size: int, words: int) -> Finding:
    """Time loss and gradients; compare them with ours."""
    torch.manual_seed(0)
    states = torch.randn(tokens, size, device=DEVICE, dtype=HALF, requires_grad=True)
    weight = torch.randn(words, size, device=DEVICE, dtype=HALF).mul_(2 / size**0.5).requires_grad_()
    targets = torch.randint(words, (tokens,), device=DEVICE)

    def run(loss: Loss) -> tuple[Tensor, ...]:
        states.grad = weight.grad = None
        total = loss(states, weight, targets)
        total.backward()
        return total, *(tensor.grad for tensor in (states, weight) if tensor.grad is not None)

    wanted, found = run(list_heads()["ours"]), run(loss)
    errors = [distance(a, b) for a, b in zip(found, wanted, strict=True)]
    del wanted, found
    reset_peak_memory(DEVICE)
    seconds = time_call(partial(run, loss))
    # cut-cross-entropy leaves out gradients that round to nothing.
    fields = {"ms": seconds * 1e3, "peak_gib": peak_memory(DEVICE) / 2**30, "errors": errors}
    return max(errors) < (1e-4 if ON_CPU else 0.05), fields


def compare(name: str, script: str, shape: str, options: str, seconds: float) -> Finding:
    """Run a benchmark in which the sides take turns, and note each side's figures."""
    model = shape if shape == "miniature" else str(make_model(shape))
    torch.cuda.empty_cache()
    output = OUT / "logs" / f"{name.replace(', ', '_').replace(' ', '_')}.json"
    words = ["--model", model, "--device", DEVICE.type, "--output", str(output)]
    words += ["--against", "trl", "unpadded"] if script == "optimise" else ["--drawn"]
    command = [sys.executable, str(FOLDER / f"{script}.py"), *words, *options.split()]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
    )
    print(done.stdout)
    if done.returncode:
        return False, {"why": next((line for line in done.stdout.splitlines() if "Error" in line), "killed")}
    results = json.loads(output.read_text())
    for side, figures in results.items():
        if isinstance(figures, dict) and "seconds" in figures:
            agreement = results.get("agreement", {}).get(side, {})
            ratio, gib = figures["seconds"] / results["ours"]["seconds"], figures["peak_bytes"] / 2**30
            tokens = {"tokens": figures["tokens"]} if "tokens" in figures else {}
            times = {"seconds": figures["seconds"], "times_ours": ratio, "peak_gib": gib}
            note(f"{name}, {side}", None, **times, **tokens, **agreement)
    return True, {"largest_difference": results["largest_difference"]} if script == "reward" else {}


def main() -> None:
    if find_spec("trl") is None:
        note("peers", why="skipped: TRL is not installed; `make setup` does it")
        return
    end = time.monotonic() + float(sys.argv[1])
    results = [
        attempt(f"head, {sizes[1]} to {sizes[2]}, {side}", partial(head, loss, *sizes))
        for sizes in HEADS
        for side, loss in list_heads().items()
    ]
    for script, shape, options in REHEARSED if TINY else CASES:
        name, left = f"{script}, {shape}, {options.replace('--', '')}", end - time.monotonic()
        if left < 10:
            note(name, why="skipped: no time left")
            continue
        length = {"optimise": "--shortest 300 --length 1500 ", "reward": "--length 1000 "}[script]
        words = options if TINY else f"--rounds 3 {length}{options}"
        results.append(attempt(name, partial(compare, name, script, shape, words, left)))
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
