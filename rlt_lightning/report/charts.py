"""What is drawn of runs: charts as plain data, the same for every drawing library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlt_lightning.datamodules.evaluation_sets import SETS
from rlt_lightning.records.catalogue import PHASES, SECTIONS, base, described, held_out
from rlt_lightning.records.results import HEADER, PAPER_ROWS, PAPER_SETS, result_row
from rlt_lightning.report.collect import Curve, Run
from rlt_lightning.report.completions import Spread

Chart = dict[str, Any]
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
