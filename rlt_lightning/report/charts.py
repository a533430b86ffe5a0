"""The charts of runs as plain data: collect.py reads the runs, page.py calls, web/charts.js draws.

Title, unit and caption of a metric's chart are its entry in run/metrics.yaml.
The other titles are here: Time of an iteration, Groups by reward, Accuracy, pass@j, and what
completions are by kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rlt_lightning.evaluation.results import (
    HEADER,
    PAPER_SOURCE,
    build_paper_table,
    build_result_row,
    find_comparable_sets,
)
from rlt_lightning.report.collect import Run, Spread, is_distilled
from rlt_lightning.run.metrics import (
    OF_STUDENT,
    Metric,
    find_metric,
    label_columns,
    list_metrics,
    training_name,
    validation_name,
)
from rlt_lightning.run.metrics_csv import Curve

Chart = dict[str, Any]
OTHERS = "All other figures"
COMPLETIONS = "What the completions are"
# Figures of EvaluateEvery that get a chart; the standard error is the band of the first.
ACCURACY = (
    *("pass_at_1", "pass_at_k", "maj_at_k"),
    *("formatted_frac", "truncated_frac", "timed_out_frac", "tokens_mean"),
)


def build_curve_sections(runs: list[Run]) -> list[dict[str, Any]]:
    """Return charts of the metrics by iteration, in sections; none is empty."""
    names = {training_name(name) for run in runs for name in run.metrics if not name.startswith("eval/")}
    names |= {metric.name for metric in list_metrics() if any(find_spread(run, metric) for run in runs)}
    # Terms that are not in the catalogue, of runs without metrics.csv.
    columns = {column for run in runs if not run.metrics for column in run.completions.spreads}
    names |= {
        f"reward/{column.removesuffix('_reward')}"
        for column in columns - label_columns().keys()
        if column.endswith("_reward")
    }
    names = {name for name in names if not is_of_student(name)}  # they are in the chart of all students
    known = [metric for metric in list_metrics() if metric.name in names]
    unknown = [find_metric(name) for name in sorted(names - {metric.name for metric in known})]
    distilled = all(map(is_distilled, runs))
    drawn = [
        metric for metric in (*known, *unknown) if metric.drawn == "line" and not is_shown_raw(runs, metric)
    ]
    shown = [name_distilled(metric) if distilled else metric for metric in drawn]
    titles = list(dict.fromkeys(metric.section for metric in list_metrics() if metric.section))
    if distilled:  # its loss is what falls; the rest is computed from it
        titles.sort(key=lambda title: title != "Policy")
    sections: list[dict[str, Any]] = [
        {"title": "Accuracy while training", "charts": build_accuracy_charts(runs)},
        {"title": COMPLETIONS, "charts": build_kind_charts(runs)},
    ]
    for title in titles:
        charts = list(build_time_charts(runs)) if title == "Time and memory" else []
        charts += [build_metric_chart(runs, metric) for metric in shown if metric.section == title]
        heading = "Divergence" if distilled and title == "Reward" else title
        sections.append({"title": heading, "charts": charts})
    others = sorted((metric for metric in shown if not metric.section), key=lambda metric: metric.name)
    charts = [build_metric_chart(runs, metric) for metric in others]
    sections.append({"title": OTHERS, "charts": charts, "folded": True})
    return [section for section in sections if section["charts"]]


def is_of_student(name: str) -> bool:
    """Return whether a metric is that of one of several students, NAME/LABEL."""
    return name.rpartition("/")[0] in OF_STUDENT


def is_shown_raw(runs: list[Run], metric: Metric) -> bool:
    """Return whether a student's raw figure is the one that enters the reward, whose chart is enough."""
    as_entered = f"reward/{metric.name.removeprefix('student/')}"
    return metric.prefix == "student" and all(
        metric.name not in run.metrics or run.metrics[metric.name] == run.metrics.get(as_entered)
        for run in runs
    )


def name_distilled(metric: Metric) -> Metric:
    """Return a metric of on-policy distillation under its true name: the recorded reward is no reward."""
    if metric.name != "reward/mean":
        return metric
    meaning = (
        "minus the divergence from the teacher, mean over the answers of a step. rollouts.jsonl has it in "
        "the column `reward`, but no reward is maximised"
    )
    return replace(metric, title="Minus the divergence, by answer", meaning=meaning, bounds="≤ 0")


def build_kind_charts(runs: list[Run]) -> list[Chart]:
    """Return charts of which kinds the completions are of and which of them end with the right answer."""
    common: Chart = {"kind": "lines", "name": "rollouts.jsonl", "unit": "%", "x_title": "iteration"}
    common |= {"limits": [0, 100]}

    def build_series(label: str, fractions: dict[int, dict[int, float]]) -> list[dict[str, Any]]:
        return [
            {"run": run, "label": label, "x": [*curve], "y": [100 * v for v in curve.values()]}
            for run, curve in fractions.items()
            if curve
        ]

    by_kind = {
        kind: build_series(kind, {i: run.completions.kinds.get(kind, {}) for i, run in enumerate(runs)})
        for kind in dict.fromkeys(kind for run in runs for kind in run.completions.kinds)
    }
    about = (
        "steps: all of them, and right. filler, leap, wrong: how it breaks off. A leap names an answer "
        "without the steps to it."
    )
    if len(runs) == 1:
        charts = [("Kinds of completions", about, [part for series in by_kind.values() for part in series])]
    else:  # a chart for each: their lines would hide each other
        charts = [
            (f"Kind: {kind}", about, [part | {"label": ""} for part in series])
            for kind, series in by_kind.items()
        ]
    about = "Fraction of the completions that end with the right number or, for Countdown, expression."
    right = build_series("", {i: run.completions.right for i, run in enumerate(runs)})
    charts.append(("Ends with the right answer", about, right))
    return [
        common | {"title": title, "about": about, "series": series}
        for title, about, series in charts
        if series
    ]


def build_accuracy_charts(runs: list[Run]) -> list[Chart]:
    """Return the charts of what EvaluateEvery has logged, each with all sets."""
    charts = [build_accuracy_chart(runs, figure) for figure in ACCURACY]
    # With one answer to each problem, pass@k and maj@k are pass@1; with two, maj@k is.
    drawn = [chart for chart in charts[1:] if list_values(chart) != list_values(charts[0])]
    shown = [chart for chart in (charts[0], *drawn) if chart["series"]]
    return [chart for chart in shown if "timed_out" not in chart["name"] or any(map(any, list_values(chart)))]


def build_accuracy_chart(runs: list[Run], figure: str) -> Chart:
    """Return the chart of one figure of EvaluateEvery. The figures of `rlt test` have other charts."""
    metric, series = find_metric(f"eval/SET/{figure}"), []
    scale = 100 if metric.unit == "fraction" else 1
    for number, run in enumerate(runs):
        of_fit = [name for name in run.metrics if name.startswith("eval/") and run.evaluation is None]
        for name in (name for name in of_fit if name.endswith(f"/{figure}")):
            errors = run.metrics.get(name.replace("pass_at_1", "standard_error"), ([], []))
            deviations = dict(zip(*errors, strict=True)) if figure == "pass_at_1" else {}
            curve = add_band(run.metrics[name], deviations, metric.limits)
            for part in curve.keys() - {"x"}:
                curve[part] = [None if value is None else scale * value for value in curve[part]]
            # Not the set's title: a part of a published set is another set.
            series.append({"run": number, "label": name.split("/")[1], **curve})
    return {
        "kind": "lines",
        "limits": [scale * bound if bound is not None else None for bound in metric.limits],
        "name": metric.name,
        "title": metric.title[:1].upper() + metric.title[1:],
        "unit": "%" if scale == 100 else metric.unit,
        "about": metric.caption + (" Band: ± its standard error." if figure == "pass_at_1" else ""),
        "x_title": "iteration",
        "series": series,
    }


def list_values(chart: Chart) -> list[list[float | None]]:
    """Return the values of all curves of a chart."""
    return [series["y"] for series in chart["series"]]


def build_metric_chart(runs: list[Run], metric: Metric) -> Chart:
    """Return one metric's chart: all runs, their students, the spread over completions, held-out values."""
    name, series = metric.name, []
    limits = find_limits(runs, metric)
    for number, run in enumerate(runs):
        spread = find_spread(run, metric)
        curve = run.metrics.get(name) or build_mean_curve(spread)
        if curve[0]:
            deviations: dict[int, float | None] = {step: part.std for step, part in spread.items()}
            if name == "reward/mean":  # metrics.csv has its deviation for most steps
                deviations |= dict(zip(*run.metrics.get("reward/std", ([], [])), strict=True))
            label = "all students" if list_student_labels(run, name) else ""
            series.append({"run": number, "label": label, **add_band(curve, deviations, limits)})
        others = {validation_name(name): "held-out problems"}
        for label in list_student_labels(run, name):
            others |= {f"{name}/{label}": label}
            others |= {f"{validation_name(name)}/{label}": f"{label}, held-out problems"}
        for own, label in others.items():
            if own in run.metrics:
                steps, values = run.metrics[own]
                series.append({"run": number, "label": label, "x": steps, "y": values})
    return {
        "kind": "lines",
        "limits": list(limits),
        "name": name,
        "title": metric.title,
        "unit": metric.unit,
        "about": metric.caption,
        "x_title": "iteration",
        "series": series,
    }


def list_student_labels(run: Run, name: str) -> list[str]:
    """Return the labels of a run's several students that a metric is logged for."""
    if name not in OF_STUDENT:
        return []
    return [found.removeprefix(f"{name}/") for found in run.metrics if found.startswith(f"{name}/")]


def find_limits(runs: list[Run], metric: Metric) -> tuple[float | None, float | None]:
    """Return the bounds of a metric that hold for these runs: some are only true without some option."""
    low, high = metric.limits
    values = [v for run in runs for v in run.metrics.get(metric.name, ([], []))[1] if v is not None]
    conditional = any("reward/baseline" in run.metrics for run in runs) and "baseline" in metric.bounds
    if low is not None and min(values, default=low) < low:
        low = None
    if high is not None and (conditional or max(values, default=high) > high):
        high = None
    return low, high


def find_spread(run: Run, metric: Metric) -> dict[int, Spread]:
    """Return the spread over completions of a metric's values by step; empty if they are not recorded.

    A term is recorded as NAME_reward by an RLTReward, and as NAME by a TextReward.
    """
    spreads = run.completions.spreads
    return spreads.get(metric.column) or spreads.get(metric.column.removesuffix("_reward"), {})


def build_mean_curve(spread: dict[int, Spread]) -> Curve:
    """Return the curve of a run that has completions but no metrics.csv."""
    return list(spread), [part.mean for part in spread.values()]


def add_band(
    curve: Curve, deviations: dict[int, float | None], limits: tuple[float | None, float | None]
) -> dict[str, Any]:
    """Return a curve, with a band of one standard deviation if it has any, cut at the metric's bounds."""
    steps, values = curve
    drawn = {"x": steps, "y": values}
    if not any(deviations.values()):
        return drawn
    widths = [deviations.get(step) for step in steps]
    least, most = (
        (-math.inf if limits[0] is None else limits[0]),
        (math.inf if limits[1] is None else limits[1]),
    )
    low, high = (
        [
            None if y is None or d is None else min(max(y + sign * d, least), most)
            for y, d in zip(values, widths, strict=True)
        ]
        for sign in (-1, 1)
    )
    return drawn | {"low": low, "high": high}


def build_time_charts(runs: list[Run]) -> Iterator[Chart]:
    """Yield a chart for each run: the time of an iteration by phase."""
    phases = [metric for metric in list_metrics() if metric.drawn == "stack"]
    for number, run in enumerate(runs):
        found = {phase.title: run.metrics[phase.name] for phase in phases if phase.name in run.metrics}
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


def build_group_charts(runs: list[Run]) -> list[Chart]:
    """Return a chart of the groups of a ranked data set: mean reward, and the terms that differ."""
    series = []
    for number, run in enumerate(runs):
        groups = [row["group"] for row in run.groups]
        for name, label in label_columns().items():
            values = [row.get(name) for row in run.groups]
            if not values or None in values or (name != "reward" and len(set(values)) == 1):
                continue
            part = {"run": number, "label": label, "x": groups, "y": values}
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
            "about": f"Means of groups of {' or '.join(map(str, sizes))} rows, best first. Band: smallest to "
            "largest reward of the group.",
            "x_title": "group",
            "series": series,
        }
    ]


def build_evaluation_charts(runs: list[Run]) -> list[Chart]:
    """Return charts of the accuracy on every evaluation set, and by the number of samples."""
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
    common = {"unit": "%", "name": "evaluation.json"}
    accuracy = common | {
        "kind": "bars",
        "title": "Accuracy",
        "about": "pass@1: mean fraction of a problem's responses that is right, ± its standard error.",
        "x_title": "",
        "series": bars,
    }
    by_number = common | {
        "kind": "lines",
        "title": "pass@j",
        "about": "Fraction of the problems of which some response of j is right.",
        "x_title": "responses, j",
        "series": curves,
    }
    return [chart for chart in (accuracy, by_number) if chart["series"]]


def build_evaluation_tables(runs: list[Run], names: list[str]) -> list[dict[str, Any]]:
    """Return tables of all figures of the evaluations and, if they have one of its sets, of the paper's."""
    evaluated = [(name, run.evaluation) for name, run in zip(names, runs, strict=True) if run.evaluation]
    rows = [
        [name, *build_result_row(found)]
        for name, evaluation in evaluated
        for found in evaluation["sets"].values()
    ]
    if not rows:
        return []
    tables = [{"title": "All figures", "rows": [["run", *HEADER], *rows]}]
    if any(find_comparable_sets(evaluation) for _, evaluation in evaluated):
        tables.append({"title": PAPER_SOURCE, "rows": [list(row) for row in build_paper_table()]})
    return tables
