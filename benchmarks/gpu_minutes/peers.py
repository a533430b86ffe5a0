"""Beside TRL's GRPOTrainer and a loop over samples: benchmarks/optimise.py and reward.py with random weights.

    python peers.py SECONDS       which bounds the whole

A line for each side has its seconds, how far memory rises, and the tokens that it computes. Unfair to one
side: TRL's attention with a padding mask cannot use the flash kernel, so "unpadded attention" is a side of
its own; one prompt for 16 completions is the best case of a shared prefix; "ours" in a reward gets the
engine's log-probs free, and "ours, both forwards" is like for like; the loop has no Liger.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from common import DEVICE, OUT, TINY, Finding, attempt, make_model, note

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
    ("optimise", "qwen2.5-0.5b", "--precision bf16-true"),
    ("optimise", "qwen2.5-1.5b", "--precision bf16-true --liger --rows 8"),
]
REHEARSED = [("optimise", "miniature", "--tiny --rows 2 --shortest 4"), ("reward", "tiny", "--tiny")]


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
    results = []
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
