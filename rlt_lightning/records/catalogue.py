"""Every metric and reward term once: name, unit, title, section."""

from __future__ import annotations

import re
from itertools import chain

PHASES = ("generate", "push", "score", "train")
# Charts by section: metric, title, unit, what it says. Metrics named nowhere go to the last section.
SECTIONS: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "Reward": (
        ("reward/mean", "Reward", "nats", "Mean over the completions of an iteration."),
        (
            "reward/solution",
            "Solution term",
            "nats",
            "Weighted r_SS: how likely the student finds the solution.",
        ),
        ("reward/kl", "KL term", "nats", "Weighted −r_KL: how natural the student finds the explanation."),
        ("reward/format", "Format term", "nats", "0, or the penalty of what is not closed or empty."),
        ("reward/correct", "Correct answers", "part", "Part of the answers that are right."),
        ("reward/formatted", "Well-formed answers", "part", "Part with thought and solution in their tags."),
        ("reward/timed_out", "Judging broken off", "part", "Part of the answers that count as wrong for it."),
        ("reward/group_std", "Spread within groups", "nats", "What there is to learn from."),
        ("reward/zero_std_groups", "Groups without spread", "groups", "They teach nothing."),
        ("student/solution_log_prob_mean", "Solution tokens, mean log-prob", "nats", "Of the student, raw."),
        ("student/solution_log_prob_min", "Hardest solution token", "nats", "Its log-prob, raw."),
        ("student/kl_mean", "KL, mean over think tokens", "nats", "Raw, whatever the settings."),
        ("student/kl_max", "KL, least natural token", "nats", "Raw, whatever the settings."),
    ),
    "Policy": (
        ("policy/loss", "Loss", "nats", "What was stepped; in RL it says nothing about learning."),
        (
            "policy/entropy",
            "Entropy",
            "nats",
            "Of the next token, mean over sampled tokens. Near 0: collapsed.",
        ),
        ("policy/kl_ref", "KL from the reference", "nats", "Drops at every move of the reference."),
        ("policy/grad_norm", "Gradient norm", "", "Before clipping."),
        ("policy/lr", "Learning rate", "", "Of this step."),
    ),
    "Length and form": (
        ("rollout/length_mean", "Length", "tokens", "Sampled tokens per completion."),
        ("rollout/length_max", "Longest completion", "tokens", "Of the iteration."),
        ("rollout/closed_frac", "Closed", "part", "Part of the completions that end with their tag."),
        ("rollout/truncated_frac", "Cut off", "part", "Part that met the token limit."),
        ("rollout/empty_frac", "Empty", "part", "Part without any text."),
        ("data/completion_tokens", "Tokens in the loss", "tokens", "Of this step."),
    ),
    "Time and memory": (
        ("perf/tokens_per_s", "Speed", "tokens/s", "Over all phases."),
        ("perf/generate_peak_gib", "Memory while sampling", "GiB", "Most in use."),
        ("perf/push_peak_gib", "Memory while pushing weights", "GiB", "Most in use."),
        ("perf/score_peak_gib", "Memory while scoring", "GiB", "Most in use."),
        ("perf/train_peak_gib", "Memory while training", "GiB", "Most in use."),
    ),
}


def described() -> set[str]:
    """The metrics that have a place of their own."""
    return {entry[0] for entry in chain(*SECTIONS.values())}


def base(name: str) -> str:
    """The metric of training that a validation metric goes with; others as they are."""
    return re.sub(r"/val_", "/", name)


def held_out(name: str) -> str:
    """The validation metric that goes with a metric of training."""
    return name.replace("/", "/val_", 1)
