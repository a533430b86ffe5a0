"""What is drawn of runs: charts as plain data, the same for every drawing library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

from rlt_lightning.callbacks.evaluation import HEADER, PAPER_ROWS, PAPER_SETS, result_row
from rlt_lightning.datamodules.evaluation_sets import SETS
from rlt_lightning.report.collect import Curve, Run, Spread

Chart = dict[str, Any]
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
OTHERS = "All other figures"
# Columns of completions whose spread belongs to a metric of another name.
COLUMNS = {"reward/mean": "reward", "reward/solution": "solution_log_prob_reward", "reward/kl": "kl_reward"}
COLUMNS |= {"reward/format": "format_reward", "rollout/length_mean": "num_tokens"}


def curve_sections(runs: list[Run]) -> list[dict[str, Any]]:
    """Charts of the metrics by iteration, in sections; without those that no run has."""
    names = {base(name) for run in runs for name in run.metrics if not name.startswith("eval/")}
    names |= {name for name in described() if any(spread_of(run, name) for run in runs)}
    names -= {"reward/std", *(f"perf/{phase}_s" for phase in PHASES)}  # drawn as a band, and as a stack
    sections: list[dict[str, Any]] = []
    for title, entries in SECTIONS.items():
        listed = [entry for entry in entries if entry[0] in names]
        if title == "Reward":  # the terms of other rewards
            own = sorted(name for name in names if name.startswith("reward/") and name not in described())
            listed += [(name, name, "", "") for name in own]
        charts = list(stacks(runs)) if title == "Time and memory" else []
        charts += [metric_chart(runs, *entry) for entry in listed]
        names -= {entry[0] for entry in listed}
        sections.append({"title": title, "charts": charts})
    others = [metric_chart(runs, name, name, "", "") for name in sorted(names)]
    sections.append({"title": OTHERS, "charts": others, "folded": True})
    return [section for section in sections if section["charts"]]


def described() -> set[str]:
    """The metrics that have a place of their own."""
    return {entry[0] for entry in chain(*SECTIONS.values())}


def base(name: str) -> str:
    """The metric of training that a validation metric goes with; others as they are."""
    return re.sub(r"/val_", "/", name)


def held_out(name: str) -> str:
    """The validation metric that goes with a metric of training."""
    return name.replace("/", "/val_", 1)


def metric_chart(runs: list[Run], name: str, title: str, unit: str, about: str) -> Chart:
    """One metric of all runs, with its spread over completions, and that of the held-out problems."""
    series = []
    for number, run in enumerate(runs):
        spread = spread_of(run, name)
        curve = run.metrics.get(name) or mean_curve(spread)
        if curve[0]:
            deviations: dict[int, float | None] = {step: part.std for step, part in spread.items()}
            if name == "reward/mean":  # as metrics.csv has it, where it has it
                deviations |= dict(zip(*run.metrics.get("reward/std", ([], [])), strict=True))
            series.append({"run": number, "label": "", **banded(curve, deviations)})
        if held_out(name) in run.metrics:
            steps, values = run.metrics[held_out(name)]
            series.append({"run": number, "label": "held-out problems", "x": steps, "y": values})
    return {
        "kind": "lines",
        "name": name,
        "title": title,
        "unit": unit,
        "about": about,
        "x_title": "iteration",
        "series": series,
    }


def spread_of(run: Run, name: str) -> dict[int, Spread]:
    """Spread over completions by step of what a metric is the mean of; empty where that is not recorded."""
    prefix, _, own = name.partition("/")
    column = COLUMNS.get(name, own if prefix == "reward" else "")
    return run.completions.spreads.get(column, {})


def mean_curve(spread: dict[int, Spread]) -> Curve:
    """The curve of a run that has completions but no metrics.csv."""
    return list(spread), [part.mean for part in spread.values()]


def banded(curve: Curve, deviations: dict[int, float | None]) -> dict[str, Any]:
    """A curve, with its band where there is any."""
    steps, values = curve
    drawn = {"x": steps, "y": values}
    if not any(deviations.values()):
        return drawn
    widths = [deviations.get(step) for step in steps]
    low, high = (
        [None if y is None or d is None else y + sign * d for y, d in zip(values, widths, strict=True)]
        for sign in (-1, 1)
    )
    return drawn | {"low": low, "high": high}


def stacks(runs: list[Run]) -> Iterator[Chart]:
    """The time of an iteration by phase, a chart for each run."""
    for number, run in enumerate(runs):
        found = {
            phase: run.metrics[f"perf/{phase}_s"] for phase in PHASES if f"perf/{phase}_s" in run.metrics
        }
        if found:
            yield {
                "kind": "stack",
                "name": "perf/…_s",
                "title": "Time of an iteration",
                "run": number,
                "unit": "seconds",
                "about": "By phase.",
                "x_title": "iteration",
                "series": [
                    {"run": number, "label": phase, "x": steps, "y": values}
                    for phase, (steps, values) in found.items()
                ],
            }


def group_charts(runs: list[Run]) -> list[Chart]:
    """Mean reward and its terms of the groups that a ranked data set was divided into."""
    labels = {"reward": "reward", "solution_log_prob_reward": "solution term", "kl_reward": "KL term"}
    series = []
    for number, run in enumerate(runs):
        groups = [row["group"] for row in run.groups]
        shown = {name: label for name, label in labels.items() if all(name in row for row in run.groups)}
        for name, label in shown.items() if groups else ():
            part = {"run": number, "label": label, "x": groups, "y": [row[name] for row in run.groups]}
            if name == "reward":
                part["low"] = [row["reward_min"] for row in run.groups]
                part["high"] = [row["reward_max"] for row in run.groups]
            series.append(part)
    if not series:
        return []
    sizes = sorted({row["num_rows"] for run in runs for row in run.groups})
    return [
        {
            "kind": "lines",
            "name": "groups.json",
            "title": "Groups by reward",
            "unit": "nats",
            "about": f"Means of groups of {' or '.join(map(str, sizes))} rows, best first. Band: least to "
            "largest reward of the group.",
            "x_title": "group",
            "series": series,
        }
    ]


def evaluation_charts(runs: list[Run]) -> list[Chart]:
    """Accuracy on every evaluation set, with its standard error; and by number of samples, where several."""
    bars, curves = [], []
    for number, run in enumerate(runs):
        sets = (run.evaluation or {}).get("sets", {})
        if sets:
            scores = [100 * found["pass_at_1"] for found in sets.values()]
            errors = [100 * (found.get("standard_error") or 0.0) for found in sets.values()]
            titles = [found["title"] for found in sets.values()]
            bars.append({"run": number, "label": "", "x": titles, "y": scores, "error": errors})
        for found in sets.values():
            by_samples = {int(k): 100 * value for k, value in found.get("pass_at", {}).items()}
            if len(by_samples) > 1:
                x, y = sorted(by_samples), [by_samples[k] for k in sorted(by_samples)]
                curves.append({"run": number, "label": found["title"], "x": x, "y": y})
    charts = []
    common = {"unit": "%", "name": "evaluation.json"}
    if bars:
        about = "pass@1: mean part of a problem's responses that is right, ± its standard error."
        charts.append(
            common | {"kind": "bars", "title": "Accuracy", "about": about, "x_title": "", "series": bars}
        )
    if curves:
        about = "Part of the problems of which some response of j is right."
        charts.append(
            common
            | {
                "kind": "lines",
                "title": "pass@j",
                "about": about,
                "x_title": "responses, j",
                "series": curves,
            }
        )
    return charts


def evaluation_tables(runs: list[Run], names: list[str]) -> list[dict[str, Any]]:
    """All figures of the evaluations and, where they are of its sets, the paper's beside them."""
    evaluated = [(name, run.evaluation) for name, run in zip(names, runs, strict=True) if run.evaluation]
    rows = [
        [name, *result_row(found)] for name, evaluation in evaluated for found in evaluation["sets"].values()
    ]
    if not rows:
        return []
    tables = [{"title": "All figures", "rows": [["run", *HEADER], *rows]}]
    if any(set(PAPER_SETS) & set(evaluation["sets"]) for _, evaluation in evaluated):
        header = ["model", "data", *(SETS[key].title for key in PAPER_SETS), "overall"]
        paper = [[model, size, *(f"{value:.1f}" for value in values)] for model, size, values in PAPER_ROWS]
        tables.append(
            {"title": "pass@1 in %, as published (arXiv:2506.08388, Table 1)", "rows": [header, *paper]}
        )
    return tables
