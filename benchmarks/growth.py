"""How time and memory grow with completions N and tokens T, and when sharing a prefix pays.

    .venv/bin/python benchmarks/growth.py [--rounds 5]

Three series on the CPU, SmolLM2-135M in fp32: the reward of N completions of one problem (time must be linear
in N); log-probs and their backward of T tokens through its head (memory must not grow with T * V); and
forwards of 8 sequences with prefixes of different lengths, with and without sharing, from which SHARING_COST
in numerics/packing.py was taken.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from reward import build_scorer, one_group
from side_by_side import benchmark_parser, finish, measure, read_options

from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.models.load import load_model, load_tokenizer
from rlt_lightning.models.packed import compute_log_probs
from rlt_lightning.numerics.head import Head
from rlt_lightning.numerics.log_probs import linear_log_probs
from rlt_lightning.numerics.packing import SHARING_COST, PackedSequences, ScoredSequence
from rlt_lightning.rewards import RLTReward

GOAL = 0.99  # of the variance in time that a straight line explains
# Prefixes, tokens through the head, completions of one problem.
FULL = (8, 32, 128, 512), (512, 1024, 2048, 4096, 8192), (4, 8, 16, 24, 32)
TINY = (8, 32), (16, 64), (2, 4)


def median_of(function: Callable[[], Any], rounds: int) -> dict[str, float]:
    function()
    found = [measure(function) for _ in range(rounds)]
    return {key: statistics.median(run[key] for run in found) for key in found[0]}


def reward_by_completions(
    model: Any, tokenizer: Any, counts: tuple[int, ...], rounds: int
) -> dict[int, dict[str, float]]:
    group = one_group(model, tokenizer, max(counts), 32)
    scorer = build_scorer(model, model, RLTReward(), recompute=False)
    series = {}
    for number in counts:
        some = replace(group, rollouts=group.rollouts[:number])
        series[number] = median_of(lambda some=some: scorer(some), rounds)
        print(f"reward of {number} completions {series[number]}", flush=True)
    return series


def head_by_tokens(model: Any, counts: tuple[int, ...], rounds: int) -> dict[int, dict[str, float]]:
    weight = model.get_output_embeddings().weight.detach()
    series = {}
    for number in counts:
        hidden = torch.randn(number, weight.shape[1], requires_grad=True)
        targets = torch.randint(len(weight), (number,))
        step = lambda h=hidden, t=targets: linear_log_probs(h, Head(weight), t)[0].sum().backward()  # noqa: E731
        series[number] = median_of(step, rounds)
        print(f"head on {number} tokens {series[number]}", flush=True)
    return series


@torch.no_grad()
def sharing_by_prefix(model: Any, lengths: tuple[int, ...], rounds: int) -> dict[int, dict[str, float]]:
    """Measure seconds with and without sharing, and the cost per continuation token that explains the gap."""
    series = {}
    for length in lengths:
        prefix = torch.randint(min(1000, model.config.vocab_size), (length,)).tolist()
        rests = torch.randint(min(1000, model.config.vocab_size), (8, 128)).tolist()
        sequences = [ScoredSequence(prefix, rest, [False] * (length + 127) + [True]) for rest in rests]
        shared, apart = (
            PackedSequences.from_sequences(sequences, families)
            for families in ((tuple(range(8)),), tuple((i,) for i in range(8)))
        )
        seconds = {"shared": [], "apart": []}
        for _ in range(rounds + 1):
            seconds["shared"].append(
                measure(lambda packed=shared: compute_log_probs(model, packed))["seconds"]
            )
            seconds["apart"].append(measure(lambda packed=apart: compute_log_probs(model, packed))["seconds"])
        times = {name: statistics.median(found[1:]) for name, found in seconds.items()}
        per_token = times["apart"] / apart.input_ids.shape[1]
        added = times["shared"] - per_token * shared.input_ids.shape[1]
        series[length] = times | {"sharing_cost": added / per_token / (8 * 128)}
        print(f"prefix of {length} tokens {series[length]}", flush=True)
    return series


def line(xs: list[float], ys: list[float]) -> tuple[float, float, float]:
    """Return slope and intercept of the least-squares line, and the part of the variance that it explains."""
    slope, intercept = statistics.linear_regression(xs, ys)
    return slope, intercept, statistics.correlation(xs, ys) ** 2


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    options = read_options(parser, model="miniature")
    torch.manual_seed(0)
    model, tokenizer = load_model(options.model), load_tokenizer(options.model)
    prefixes, tokens, completions = TINY if options.tiny else FULL
    sharing = sharing_by_prefix(model, prefixes, options.rounds)
    head = head_by_tokens(model, tokens, options.rounds)
    reward = reward_by_completions(model, tokenizer, completions, options.rounds)
    num_words = model.config.vocab_size
    slope, intercept, explained = line(list(reward), [run["seconds"] for run in reward.values()])
    few, many = min(tokens), max(tokens)
    growth = head[many]["peak_bytes"] / max(1, head[few]["peak_bytes"])
    costs = [round(s["sharing_cost"], 3) for s in sharing.values()]
    print(f"head: {many // few} times the tokens, {growth:.2f} times the peak memory")
    print(f"sharing costs {costs}, assumed {SHARING_COST}")
    finish(
        options.output,
        {"reward_by_completions": reward, "head_by_tokens": head, "sharing_by_prefix": sharing}
        | {"line": {"slope_s": slope, "intercept_s": intercept}},
        lambda: plot(options.output, reward, head, sharing, num_words, (slope, intercept)),
        explained=explained,
        goal=GOAL,
        head_memory=growth,
        largest_sharing_cost=max(costs),
    )


def plot(
    output: Path, reward: Any, head: Any, sharing: Any, num_words: int, fit: tuple[float, float]
) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12.6, 3.4))
    axes[0].plot(list(reward), [run["seconds"] for run in reward.values()], "o", color="#2f6f9f")
    axes[0].axline((0, fit[1]), slope=fit[0], color="#9aa5b1", zorder=0)
    axes[0].set(xlabel="completions of one problem, 32 tokens each", ylabel="seconds", title="reward")
    axes[0].set(xlim=0, ylim=(0, 1.1 * (fit[1] + fit[0] * max(reward))))
    mib = 2**20
    axes[1].plot(list(head), [run["peak_bytes"] / mib for run in head.values()], "o-", label="measured")
    axes[1].plot(list(head), [4 * t * num_words / mib for t in head], "--", label="one (T, V) tensor")
    axes[1].set(xlabel="tokens T", ylabel="peak memory, MiB", title="log-probs + backward", yscale="log")
    axes[1].legend(frameon=False)
    for name in ("apart", "shared"):
        axes[2].plot(list(sharing), [run[name] for run in sharing.values()], "o-", label=name)
    axes[2].set(xlabel="prefix, tokens", ylabel="seconds", title="8 continuations of 128 tokens", ylim=0)
    axes[2].legend(frameon=False)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(output.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main()
