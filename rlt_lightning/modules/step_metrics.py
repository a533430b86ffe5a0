"""Compute the figures that a step logs.

These functions and the losses compute a figure, a module's training_step collects it, and `log_step` of
modules/policy.py takes its mean over ranks and hands it to Lightning, whose loggers (trainer.py) write it.
A comment describes each figure where it is computed; docs/metrics.md has those that matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from rlt_lightning.engines import EngineError
from rlt_lightning.modules.phases import PhaseStats
from rlt_lightning.numerics.advantages import split_groups, zero_std_groups
from rlt_lightning.numerics.importance import Mismatch
from rlt_lightning.rollouts.columns import name_columns
from rlt_lightning.rollouts.step import StepBatch
from rlt_lightning.types import Rollouts

# Above rounding. Log-probs of temperature 1 for tokens drawn at 0.7 have 0.13 (SmolLM2-135M), of 0.84 0.03.
EXCESS_RATIO = 0.01


def reward_metrics(step: StepBatch) -> dict[str, Any]:
    """Return means over this rank's completions of the reward and its terms, raw and processed.

    Spread and equal groups are those of all ranks' completions.
    """
    rewards = step.rewards
    metrics = {
        # Over all completions of the step, and within a group.
        "reward/std": rewards.std(),
        "reward/group_std": split_groups(rewards, step.group_size).std(dim=1).mean(),
        # Groups in which every completion earned the same, so that they teach nothing.
        "reward/zero_std_frac": zero_std_groups(rewards, step.group_size).float().mean(),
    }
    return dict(**metrics, **reward_means(step, step.logged))  # a name that is taken raises an error


def reward_means(step: StepBatch, rows: Sequence[int], held_out: bool = False) -> dict[str, Any]:
    """Return the means of a scored step's columns by the names of their metrics."""
    columns = name_columns(step.choose(rows), "validation" if held_out else "training")
    return {name: values.mean() for name, values in columns.items()}


def rollout_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Return lengths and endings of the sampled completions."""
    rows = rollouts.rollouts
    lengths = [len(r.completion.token_ids) for r in rows]
    left_out = [r.view.num_left_out for r in rows if r.view]
    cut_tokens = [number for number in left_out if number is not None]  # the student's tokens are others
    # Completions that end within a character, whose tokens r_KL leaves out.
    cut = {"rollout/half_character_frac": sum(number > 0 for number in cut_tokens) / len(rows)}
    return {
        # Sampled tokens, end tag included.
        "rollout/length_mean": sum(lengths) / len(rows),
        # Those that end properly, with the end tag or, in traditional RL, an end-of-sequence token.
        "rollout/closed_frac": sum(r.closed for r in rows) / len(rows),
        "rollout/truncated_frac": sum(r.completion.finish_reason == "length" for r in rows) / len(rows),
        "rollout/empty_frac": sum(r.empty for r in rows) / len(rows),
        **(cut if cut_tokens else {}),
    }


def held_out_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Return length and fraction of closed ones of held-out completions."""
    metrics = rollout_metrics(rollouts)
    return {f"rollout/val_{name}": metrics[f"rollout/{name}"] for name in ("length_mean", "closed_frac")}


def mismatch_metrics(by_worker: dict[str, Mismatch], step: int, masks: bool = False) -> dict[str, float]:
    """Return how far engine and trainer differ; warn of a worker that does not draw from what it reports.

    Args:
        by_worker: The difference, of all ranks, by worker.
        step: The step, for the warning.
        masks: Whether importance weights mask tokens.
    """
    mismatch = sum(by_worker.values(), start=Mismatch())
    if not mismatch.num_tokens:
        return {}
    for worker, of_worker in by_worker.items():
        if not of_worker.num_tokens or of_worker.excess_ratio <= EXCESS_RATIO:
            continue
        rank_zero_warn(
            f"{name_step(step, worker)}: the ratio of trainer to engine must be 1 on average over the "
            f"sampled tokens, but is {1 + of_worker.excess_ratio:.3g}: they were drawn from another "
            "distribution than it reports, such as that of another temperature. Start the worker with "
            "--logprobs-mode processed_logprobs, or set the engine's log_probs to trainer."
        )
    return {
        # |d|, nats: the trainer's log-prob of a sampled token less the engine's.
        "rollout/mismatch_mean": mismatch.mean,
        "rollout/mismatch_max": mismatch.largest,
        # exp(d) - 1 - d, an estimate of the KL of the engine's policy from the trainer's.
        "rollout/mismatch_kl": mismatch.mean_kl,
        # (Σw)² / (n Σw²) with w = exp(d): samples that remain effective after weighting.
        "rollout/effective_sample_frac": mismatch.effective_sample_frac,
        **({"rollout/masked_frac": mismatch.num_masked / mismatch.num_tokens} if masks else {}),
    }


def require_agreement(mismatch: Mismatch, limit: float | None, step: int, worker: str = "") -> None:
    """Check that the engine's log-probs are those of the trainer's weights, all but for rounding.

    Args:
        mismatch: The difference, of all ranks.
        limit: The largest part of the log-probs' variance; None: any.
        step: The step, for the message.
        worker: The worker, likewise.

    Raises:
        EngineError: If it is larger.
    """
    if limit is not None and mismatch.num_tokens and not mismatch.unexplained_frac <= limit:
        raise EngineError(
            f"{name_step(step, worker)}: engine and trainer may differ by model.mismatch_limit {limit:g} of "
            f"the variance of the log-probs, but differ by {mismatch.unexplained_frac:.2g} "
            f"({mismatch.mean:.2g} nats per token): it samples from other weights, or reports wrong "
            "log-probs, which enter the reward. Look at the engine's data type and settings, then resume "
            "with --resume true."
        )


def name_step(step: int, worker: str) -> str:
    """Return a step, and a worker if there is one, for a message."""
    return f"Step {step}, {worker}" if worker else f"Step {step}"


def speed_metrics(
    phases: dict[str, PhaseStats], num_tokens: int, world_size: int, peak: float | None
) -> dict[str, float]:
    """Return the cost of a step, by phase; means over ranks are those of all.

    Args:
        phases: The costs of the step's phases on this rank.
        num_tokens: Its tokens of the step, which `perf/tokens_per_s` and `perf/num_tokens` count.
        world_size: The ranks.
        peak: Tokens per second that the device could train, of which `perf/mfu` is a fraction; None: unknown.
    """
    seconds, num_tokens = sum(stats.seconds for stats in phases.values()), num_tokens * world_size
    metrics = {
        "perf/step_s": seconds,
        "perf/num_tokens": float(num_tokens),
        "perf/tokens_per_s": num_tokens / seconds,
    }
    for phase, stats in phases.items():
        metrics[f"perf/{phase}_s"] = stats.seconds
        metrics[f"perf/{phase}_peak_gib"] = stats.peak_bytes / 2**30
        if phase != "push":
            metrics[f"perf/{phase}_tokens_per_s"] = world_size * stats.tokens / stats.seconds
    if peak is not None:
        metrics["perf/mfu"] = metrics["perf/train_tokens_per_s"] / world_size / peak
    return metrics
