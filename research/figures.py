"""Compute what the finding shows: the figures of `finding.json`, their intervals, and contradictions."""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean, stdev
from typing import Any

from arms import LEAD, NUM_GROUPS, TRAINED, VOTED, WITHOUT_TRACES, Arms, Setting, measure_kinds, read
from trace_kinds import chain_kind

from rlt_lightning.tags import R1

NAMES = {  # of arms, for people
    "base": "untrained student",
    "grpo": "untrained student, after GRPO for right answers",
    "warm_grpo": "student warmed up as the teacher, after GRPO for right answers",
    "own_t0": "untrained student's own greedy answers",
    "own_right_8": "untrained student's own right answers, first of 8",
    "raw": "raw traces",
    "warmup": "warm-up teacher, T 0.7",
    "rlt": "RLT teacher",
    "solution_only": "r_SS only (λ 0)",
    "kl_only": "r_KL only",
    "shuffled": "RLT, shuffled advantages",
    "lambda_0.3": "RLT, λ 0.3",
    "lambda_1": "RLT, λ 1",
    "lambda_3": "RLT, λ 3",
    "lambda_10": "RLT, λ 10",
    "warmup_t0": "warm-up teacher, T 0 (greedy traces)",
    "warmup_t0.3": "warm-up teacher, T 0.3",
    "warmup_t1": "warm-up teacher, T 1",
    "best_of_4": "warm-up teacher, best of 4 by reward",
    "best_of_equal": "warm-up teacher, best of as many as RLT samples",
    "best_of_16": "warm-up teacher, best of 16",
    "best_of_4_t0.3": "warm-up teacher, T 0.3, best of 4",
    "best_of_16_t0.3": "warm-up teacher, T 0.3, best of 16",
    "best_of_4_t1": "warm-up teacher, T 1, best of 4",
    "best_of_16_t1": "warm-up teacher, T 1, best of 16",
    "majority_of_16": "warm-up teacher, most frequent of 16",
    "rlt_t0": "RLT teacher, T 0 (greedy traces)",
    "rlt_t0.3": "RLT teacher, T 0.3",
    "rlt_t1": "RLT teacher, T 1",
    "rlt_best_of_4": "RLT teacher, best of 4",
    "rlt_best_of_16": "RLT teacher, best of 16",
    "oracle": "oracle: all steps right",
}
# Arms that RLT must beat where its setting claims it, sampled and greedily.
WITHOUT_RL = ("warmup", "warmup_t0", "best_of_equal")
# Student's t at 97.5 %, for 1 to 9 degrees of freedom.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
TERMS = ("reward", "solution_reward", "kl_reward", "format_reward")


# Figures of an arm


def read_accuracy(one: Arms, arm: str, name: str = "sampled") -> float:
    """Return the share of held-out problems that an arm's student answers right, in percent."""
    text = (one.folder / arm / name / "evaluation.json").read_text()
    return 100 * json.loads(text)["sets"]["chains"]["pass_at_1"]


def count_right_steps(one: Arms, arm: str) -> float:
    """Return the mean number of right steps that an arm's student takes before its thought breaks off."""
    questions = [row["question"] for row in read(one.data_file("test"))]
    found = []
    for row in read(one.folder / arm / "sampled" / "responses.jsonl"):
        thought = row["response"].partition(R1.thought_open)[2].partition(R1.thought_close)[0]
        found.append(chain_kind(questions[int(row["id"].split("/")[1]) - 1], thought)[1])
    return fmean(found)


def read_traces(one: Arms, arm: str) -> list[dict[str, Any]]:
    """Return the traces that an arm's student was trained on."""
    return read(one.make_traces(arm))


def collect_arm(ones: list[Arms], arm: str) -> dict[str, Any]:
    """Return an arm's figures, one per seed: accuracies and kinds of traces in percent, mean reward terms."""
    found: dict[str, Any] = {
        "accuracy": [read_accuracy(one, arm) for one in ones],
        "greedy": [read_accuracy(one, arm, "greedy") for one in ones],
    }
    if ones[0].setting.num_votes and arm in VOTED:
        found |= collect_votes(ones, arm)
    if arm in WITHOUT_TRACES:
        return found
    traces = [read_traces(one, arm) for one in ones]
    found["kinds"] = [measure_kinds(rows) for rows in traces]
    if traces[0][0].keys() >= set(TERMS):
        found["terms"] = [{term: fmean(row[term] for row in rows) for term in TERMS} for rows in traces]
    if arm in TRAINED:
        found["rise"] = [measure_rise(one, arm) for one in ones]
    return found


def collect_votes(ones: list[Arms], arm: str) -> dict[str, Any]:
    """Return what several answers show: pass@k and maj@k in percent, entropies in nats a token."""
    texts = [(one.folder / arm / "votes" / "evaluation.json").read_text() for one in ones]
    sets = [json.loads(text)["sets"]["chains"] for text in texts]
    entropies = [json.loads((one.folder / arm / "entropies.json").read_text()) for one in ones]
    return {
        "num_votes": ones[0].setting.num_votes,
        "pass_at_k": [100 * some["pass_at_k"] for some in sets],
        "maj_at_k": [100 * some["maj_at_k"] for some in sets],
        **{f"{who}_entropy": [some[who] for some in entropies] for who in entropies[0]},
    }


def measure_rise(one: Arms, arm: str) -> dict[str, float]:
    """Return how much the reward that was trained, and its terms, rose from the first quarter to the last."""
    rows = read_curves(one, arm)
    quarter = len(rows["reward/mean"]) // 4
    return {name: fmean(values[-quarter:]) - fmean(values[:quarter]) for name, values in rows.items()}


def read_curves(one: Arms, arm: str) -> dict[str, list[float]]:
    """Return the mean reward and its terms at every iteration of RLT."""
    names = ("reward/mean", "reward/solution", "reward/kl")
    with (one.folder / arm / "teacher" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in names}


def measure_kinds_over_iterations(one: Arms, arm: str) -> dict[str, list[float]]:
    """Return the share of each kind among the completions of each iteration, in percent."""
    rows = defaultdict(list)
    for row in read(one.folder / arm / "teacher" / "rollouts.jsonl"):
        rows[row["step"]].append({"question": row["question"], "reasoning_trace": row["explanation"]})
    shares = [measure_kinds(rows[step]) for step in sorted(rows)]
    return {kind: [share[kind] for share in shares] for kind in shares[0]}


def measure_reward_by_kind(ones: list[Arms]) -> dict[str, dict[str, float]]:
    """Return the mean reward and the number of the warm-up teacher's traces of each kind."""
    rewards = split_rewards(row for one in ones for row in read_traces(one, "warmup"))
    return {kind: {"reward": fmean(values), "num": len(values)} for kind, values in rewards.items()}


def split_rewards(rows: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the rewards of traces of each kind."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        rewards[chain_kind(row["question"], row["reasoning_trace"])[0]].append(row["reward"])
    return rewards


def collect_groups(ones: list[Arms], name: str) -> list[dict[str, Any]]:
    """Return the mean reward and kinds of each group of ranked traces, and how its students do."""
    found = []
    for group in range(1, NUM_GROUPS + 1):
        ranked = [one.folder / name / "ranked" for one in ones]
        means = [json.loads((folder / "groups.json").read_text())[group - 1]["reward"] for folder in ranked]
        rows = [row for folder in ranked for row in read(folder / "groups" / f"group-{group:02d}.jsonl")]
        accuracies = [read_accuracy(one, f"{name}/{group}") for one in ones]
        taken = [count_right_steps(one, f"{name}/{group}") for one in ones]
        found.append(
            {
                "reward": fmean(means),
                "accuracy": accuracies,
                "right_steps": taken,
                "kinds": measure_kinds(rows),
            }
        )
    return found


def collect(
    mains: list[Arms], others: list[Arms], arms: list[str], whole: bool, seconds: float
) -> dict[str, Any]:
    """Return all figures, as `finding.json` has them; accuracies and kinds are in percent."""
    found: dict[str, Any] = {
        "unit": "percent",
        "seeds": [one.seed for one in mains],
        "seconds": round(seconds),
    }
    found["arms"] = {arm: collect_arm(mains, arm) for arm in arms}
    found["reward_by_kind"] = measure_reward_by_kind(mains)
    found["groups"] = collect_groups(mains, "groups") if whole else []
    if whole:
        for name in ("groups_solution_only", "groups_kl_only"):
            found[name] = collect_groups(mains[:1], name)
    if others:
        settings = dict.fromkeys(one.setting.name for one in others)
        found["variations"] = {
            name: {arm: collect_arm([one for one in others if one.setting.name == name], arm) for arm in LEAD}
            for name in settings
        }
    return found


# Intervals


def compute_interval(values: list[float]) -> float:
    """Return half the 95 % interval of a mean: over seeds by Student's t, or over one seed's problems."""
    if len(values) == 1:
        return 196 * math.sqrt(values[0] / 100 * (1 - values[0] / 100) / Setting.num_test)
    return T_975[min(len(values), 10) - 2] * stdev(values) / math.sqrt(len(values))


def compute_difference(
    arms: dict[str, Any], arm: str, other: str, how: str = "accuracy"
) -> tuple[float, float]:
    """Return the mean difference of two arms' accuracies, sampled or `greedy`, and half of its 95 % interval.

    Seeds are paired. With one seed the interval is over its problems, as if the students were independent.
    """
    a, b = (arms[name][how] for name in (arm, other))
    differences = [x - y for x, y in zip(a, b, strict=True)]
    if len(differences) == 1:
        return differences[0], math.hypot(compute_interval(a), compute_interval(b))
    return fmean(differences), compute_interval(differences)


def list_failures(figures: dict[str, Any]) -> list[str]:
    """Return one sentence for each result that contradicts the finding.

    Where the most probable explanation is filler, RLT must beat every arm of `WITHOUT_RL` in sampled and in
    greedy answers; in the main setting only the warm-up teacher at temperature 0.7.
    """
    arms, found = figures["arms"], []

    def is_above(arm: str, other: str, of: dict[str, Any] = arms, how: str = "accuracy") -> bool:
        mean, half = compute_difference(of, arm, other, how)
        return mean - half > 0

    if not {"warmup", "rlt"} <= arms.keys():
        return []
    if not is_above("rlt", "warmup"):
        found.append("the interval of RLT minus warm-up touches 0")
    if figures.get("setting") == "filler":
        for arm in (arm for arm in WITHOUT_RL if arm in arms):
            found += [
                f"RLT is not above {NAMES[arm]} ({name})"
                for how, name in (("accuracy", "sampled"), ("greedy", "greedy"))
                if not is_above("rlt", arm, how=how)
            ]
    if "shuffled" in arms:
        rises = [one["reward/mean"] for one in arms["shuffled"]["rise"]]
        gain, _ = compute_difference(arms, "rlt", "warmup")
        rises_too = (
            is_above("shuffled", "warmup") or compute_difference(arms, "shuffled", "warmup")[0] > gain / 4
        )
        if rises_too or (len(rises) > 1 and fmean(rises) - compute_interval(rises) > 0):
            found.append("the control with shuffled advantages rises")
    for arm in {"solution_only", "kl_only"} & arms.keys():
        if not is_above("rlt", arm):
            found.append(f"one term of the reward reaches RLT ({NAMES[arm]})")
    for name, some in figures.get("variations", {}).items():
        if not is_above("rlt", "warmup", some):
            found.append(f"the interval of RLT minus warm-up touches 0 ({name.replace('_', ' ')})")
    return found
