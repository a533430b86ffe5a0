"""The last step of examples/pipeline.sh: a table of the evaluations, and a picture of what each stage did."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

NAMES = {"evaluate_base": "SmolLM2-135M", "evaluate_student": "after distillation"}


def main(run: Path) -> None:
    """Write `pipeline.md` and `pipeline.svg` into the folder of the runs."""
    evaluations = {
        label: json.loads((run / name / "evaluation.json").read_text()) for name, label in NAMES.items()
    }
    page = table(evaluations)
    (run / "pipeline.md").write_text(page)
    draw(run, evaluations)
    print(f"\n{page}\nTable: {run / 'pipeline.md'}, picture: {run / 'pipeline.svg'}")


def table(evaluations: dict[str, Any]) -> str:
    """Return the accuracies before and after as a Markdown table, one row per model and set."""
    lines = ["| student | set | problems × samples | pass@1 ± standard error | well-formed |"]
    lines.append("|---|---|---|---|---|")
    for label, evaluation in evaluations.items():
        for name, result in evaluation["sets"].items():
            size = f"{result['num_problems']:.0f} × {result['num_samples']}"
            score, error = 100 * result["pass_at_1"], 100 * result["standard_error"]
            formed = 100 * result["formatted_frac"]
            lines.append(f"| {label} | {name} | {size} | {score:.1f} ± {error:.1f} % | {formed:.0f} % |")
    return "\n".join(lines) + "\n"


def draw(run: Path, evaluations: dict[str, Any]) -> None:
    """Draw the teacher's reward, the rewards of its traces, the student's loss, and the accuracies."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    (reward, traces), (loss, accuracy) = figure.subplots(2, 2)
    reward.plot(*metric(run / "teacher_rlt", "reward/mean"), "o-", markersize=4)
    reward.set(title="2: the teacher's reward", xlabel="GRPO iteration", ylabel="nats")
    rows = [json.loads(line) for line in (run / "generate" / "traces.jsonl").open()]
    chosen = [json.loads(line) for line in (run / "generate" / "distillation.jsonl").open()]
    bins = [row["reward"] for row in rows]
    _, edges, _ = traces.hist(bins, bins=24, alpha=0.5, label=f"all {len(rows)} traces")
    traces.hist([row["reward"] for row in chosen], bins=edges, alpha=0.7, label=f"the {len(chosen)} selected")
    traces.set(title="3: rewards of the traces", xlabel="reward, nats", ylabel="traces")
    traces.legend()
    loss.plot(*metric(run / "student_sft", "policy/loss"), "-")
    loss.set(title="4: the student's loss", xlabel="optimizer step", ylabel="nats per token")
    for place, (label, evaluation) in enumerate(evaluations.items()):
        [result] = evaluation["sets"].values()
        score, error = 100 * result["pass_at_1"], 100 * result["standard_error"]
        accuracy.bar(place, score, yerr=error, capsize=6, width=0.6, label=label)
        accuracy.annotate(f"{score:.1f} %", (place, score + error), ha="center", va="bottom")
    accuracy.set(title="5: accuracy on unseen problems", ylabel="pass@1, %")
    accuracy.set_xticks(range(len(evaluations)), list(evaluations))
    accuracy.margins(y=0.2)
    figure.savefig(run / "pipeline.svg")


def metric(run: Path, name: str) -> tuple[list[float], list[float]]:
    """Return the steps at which a run logged a metric, and the metric's values."""
    with (run / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get(name)]
    return [float(row["step"]) for row in rows], [float(row[name]) for row in rows]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
