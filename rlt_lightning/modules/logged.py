"""The figures of a step that are logged; docs/metrics.md describes each."""

from __future__ import annotations

from typing import Any

from rlt_lightning.modules.meter import GIB, PhaseCost
from rlt_lightning.numerics.advantages import zero_std_groups
from rlt_lightning.types import RewardTerms, Rollouts


def reward_metrics(terms: RewardTerms, group_size: int) -> dict[str, Any]:
    """Means over the step's completions of the reward and its terms, before and after processing."""
    groups = terms.reward.view(-1, group_size)  # (P, G)
    return {
        "reward/mean": terms.reward.mean(),
        "reward/std": terms.reward.std(),
        "reward/group_std": groups.std(dim=1).mean(),
        "reward/zero_std_groups": zero_std_groups(terms.reward, group_size).float().sum(),
        **{f"reward/{name}": values.mean() for name, values in terms.parts().items()},
        **{name: values.mean() for name, values in terms.details().items()},
    }


def rollout_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Lengths and endings of the sampled completions."""
    rows = rollouts.rollouts
    lengths = [len(r.completion.token_ids) for r in rows]
    return {
        "rollout/length_mean": sum(lengths) / len(rows),
        "rollout/length_max": float(max(lengths)),
        "rollout/closed_frac": sum(r.closed for r in rows) / len(rows),
        "rollout/truncated_frac": sum(r.completion.finish_reason == "length" for r in rows) / len(rows),
        "rollout/empty_frac": sum(r.empty for r in rows) / len(rows),
    }


def speed_metrics(phases: dict[str, PhaseCost], num_tokens: int, peak_flops: float) -> dict[str, float]:
    """What the step cost, by phase.

    Args:
        phases: Of the step.
        num_tokens: The step's own tokens, which `perf/tokens_per_s` counts.
        peak_flops: Per second, measured; `perf/mfu` is a part of it.
    """
    metrics = {"perf/tokens_per_s": num_tokens / sum(cost.seconds for cost in phases.values())}
    for phase, cost in phases.items():
        metrics[f"perf/{phase}_s"] = cost.seconds
        metrics[f"perf/{phase}_peak_gib"] = cost.peak_bytes / GIB
        if phase != "push":
            metrics[f"perf/{phase}_tokens_per_s"] = cost.tokens / cost.seconds
    train = phases["train"]
    return metrics | {
        "perf/mfu": train.flops / train.seconds / peak_flops,
        "perf/peak_tflops": peak_flops / 1e12,
        "perf/padding_frac": train.padding_tokens / train.tokens,
        "perf/shared_frac": 1 - train.tokens / train.unshared_tokens,
    }
