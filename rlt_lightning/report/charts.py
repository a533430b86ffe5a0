"""The charts of runs as plain data: collect.py reads the runs, page.py calls, web/charts.js draws.

Title, unit and caption of a metric's chart are its entry in run/metrics.yaml.
The other titles are here: Time of an iteration, Groups by reward, Accuracy, pass@j.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlt_lightning.evaluation.results import (
    HEADER,
    PAPER_SOURCE,
    build_paper_table,
    build_result_row,
    find_comparable_sets,
)
from rlt_lightning.report.collect import Run, Spread
from rlt_lightning.run.metrics import (
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
    known = [metric for metric in list_metrics() if metric.name in names]
    unknown = [find_metric(name) for name in sorted(names - {metric.name for metric in known})]
    shown = [metric for metric in (*known, *unknown) if metric.drawn == "line"]
    sections: list[dict[str, Any]] = [
        {"title": "Accuracy while training", "charts": build_accuracy_charts(runs)}
    ]
    for title in dict.fromkeys(metric.section for metric in list_metrics() if metric.section):
        charts = list(build_time_charts(runs)) if title == "Time and memory" else []
        charts += [build_metric_chart(runs, metric) for metric in shown if metric.section == title]
        sections.append({"title": title, "charts": charts})
    others = sorted((metric for metric in shown if not metric.section), key=lambda metric: metric.name)
    charts = [build_metric_chart(runs, metric) for metric in others]
    sections.append({"title": OTHERS, "charts": charts, "folded": True})
    return [section for section in sections if section["charts"]]


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
            curve = add_band(run.metrics[name], deviations)
            for part in curve.keys() - {"x"}:
                curve[part] = [None if value is None else scale * value for value in curve[part]]
            # Not the set's title: a part of a published set is another set.
            series.append({"run": number, "label": name.split("/")[1], **curve})
    return {
        "kind": "lines",
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
    """Return one metric's chart, with all runs, the spread over completions and the held-out values."""
    name, series = metric.name, []
    for number, run in enumerate(runs):
        spread = find_spread(run, metric)
        curve = run.metrics.get(name) or build_mean_curve(spread)
        if curve[0]:
            deviations: dict[int, float | None] = {step: part.std for step, part in spread.items()}
            if name == "reward/mean":  # metrics.csv has its deviation for most steps
                deviations |= dict(zip(*run.metrics.get("reward/std", ([], [])), strict=True))
            series.append({"run": number, "label": "", **add_band(curve, deviations)})
        if validation_name(name) in run.metrics:
            steps, values = run.metrics[validation_name(name)]
            series.append({"run": number, "label": "held-out problems", "x": steps, "y": values})
    return {
        "kind": "lines",
        "name": name,
        "title": metric.title,
        "unit": metric.unit,
        "about": metric.caption,
        "x_title": "iteration",
        "series": series,
    }


def find_spread(run: Run, metric: Metric) -> dict[int, Spread]:
    """Return the spread over completions of a metric's values by step; empty if they are not recorded.

    A term is recorded as NAME_reward by an RLTReward, and as NAME by a TextReward.
    """
    spreads = run.completions.spreads
    return spreads.get(metric.column) or spreads.get(metric.column.removesuffix("_reward"), {})


def build_mean_curve(spread: dict[int, Spread]) -> Curve:
    """Return the curve of a run that has completions but no metrics.csv."""
    return list(spread), [part.mean for part in spread.values()]


def add_band(curve: Curve, deviations: dict[int, float | None]) -> dict[str, Any]:
    """Return a curve, with a band of one standard deviation if it has any."""
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
