"""Train the run that docs/example_run.md shows, and write the page: `python scripts/run_page.py`.

    rlt fit ─▶ runs/example ─ keep_files ─▶ docs/example_run/ ─ write_pages ─▶ its report.html, curves.svg,
                                                                               docs/example_run.md

docs/example_run/ has the run's own files, but of rollouts.jsonl only the rows that the report shows.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
from matplotlib.figure import Figure

from rlt_lightning.commands.report import choose_extremes, read_end_iterations, write_report
from rlt_lightning.run.jsonl import JsonRow, format_line, read_json_rows
from rlt_lightning.run.metrics_csv import Curve, read_metrics

ROOT = Path(__file__).parents[1]
KEPT, PAGE = Path("docs/example_run"), Path("docs/example_run.md")
OPTIONS = "--config laptop/rlt --data.val_rows 64 --trainer.val_check_interval 10 --output_dir runs/example"
COMMAND = f"rlt fit {OPTIONS}"
SHOWN = ((0, 6), (-1, 4))  # of the first iteration so many completions, of the last so many
TERMS = ("solution", "kl", "format")
# What to watch: the metric, its held-out name, and its healthy range.
CURVES = {
    "reward/mean": "rises over tens of steps; dashed: validation rows",
    "rollout/closed_frac": "above 0.9 from the first step",
    "reward/group_std": "well above 0",
    "policy/entropy": "falls slowly; 0.02 is usual for a right miniature, at 0 sampling has collapsed",
}
INTRODUCTION = f"""# A run to look at

```sh
{COMMAND}
rlt report runs/example
```

This is what a run leaves: `laptop/rlt`, 40 iterations of a teacher with 184,000 parameters on a CPU. Look
at yours in the same order. (`python scripts/run_page.py` trains this run and writes this page.)

* [Its report](example_run/report.html): figures, curves, and completions with the heat of each token. (A git
  host shows its source: open it on the site, or download it.)
* [metrics.csv](example_run/metrics.csv): every metric of every iteration.
  [rollouts.jsonl](example_run/rollouts.jsonl): here only the completions that the report shows.
  [config.yaml](example_run/config.yaml): all settings.
* The final teacher was `runs/example/model`.

## Four curves

![The reward rises from {{first:.2f}} to {{last:.2f}}, and three other curves](example_run/curves.svg)

| metric | step 1 | mean of steps 2 to 10 | 11 to 20 | 31 to 40 | healthy |
|---|---|---|---|---|---|
"""
COMPLETIONS = """
## Ten completions

The reward is the sum of three terms: how probable the student finds the solution, minus how unnatural the
explanation is to it, minus a penalty for a wrong format ([the terms](method.md#the-reward)). Of each problem
you see the best and the worst of eight completions; in the last step they are alike.

| step | reward | solution | KL | format | question | explanation |
|---|---|---|---|---|---|---|
"""


def keep_files(run: Path) -> None:
    """Copy a run's files into docs/, with few of its completions."""
    KEPT.mkdir(parents=True, exist_ok=True)
    for name in ("config.yaml", "metrics.csv"):
        shutil.copy(run / name, KEPT / name)
    rows = [row for end in read_end_iterations(run / "rollouts.jsonl") for row in choose_extremes(end)]
    (KEPT / "rollouts.jsonl").write_text("".join(map(format_line, rows)))


def write_pages() -> None:
    """Write the report, the curves and the page from the files in docs/."""
    write_report(KEPT, KEPT / "report.html")
    curves = read_metrics(KEPT / "metrics.csv")
    draw(curves)
    PAGE.write_text(build_page(curves, list(read_json_rows(KEPT / "rollouts.jsonl"))))


def draw(curves: dict[str, Curve]) -> None:
    """Draw what to watch first."""
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "rlt", "font.size": 9}
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    for name, axes in zip(CURVES, figure.subplots(2, 2).flat, strict=True):
        axes.plot(*curves[name], color="tab:blue")
        if name == "reward/mean":
            axes.plot(*curves["reward/val_mean"], "--", color="tab:orange")
        if name.endswith("_frac"):
            axes.set_ylim(0, 1.05)
        axes.set_title(name)
    figure.savefig(KEPT / "curves.svg", metadata={"Date": None})


def build_page(curves: dict[str, Curve], rows: Sequence[JsonRow]) -> str:
    """Return the page: what the run left, the curves in figures, and ten completions with their terms."""
    rewards = curves["reward/mean"][1]
    page = INTRODUCTION.format(first=rewards[0], last=rewards[-1])
    for name, healthy in CURVES.items():
        values = [value for value in curves[name][1] if value is not None]
        means = [show(fmean(part)) for part in (values[:1], values[1:10], values[10:20], values[30:])]
        page += f"| `{name}` | {' | '.join(means)} | {healthy} |\n"
    page += COMPLETIONS
    for end, number in SHOWN:
        for row in [row for row in rows if row["step"] == rows[end]["step"]][:number]:
            figures = [show(row["reward"]), *(show(row[f"{term}_reward"]) for term in TERMS)]
            texts = [clean(row["question"]), clean(row["explanation"])]
            page += f"| {' | '.join([str(row['step']), *figures, *texts])} |\n"
    return page


def show(value: float) -> str:
    """Return a figure of a table."""
    return f"{value:.2f}".replace("-", "−")


def clean(text: str) -> str:
    """Return a text as a cell of a table."""
    return f"`{' '.join(text.split()).replace('|', '¦')}`" if text.strip() else "(empty)"


def main() -> None:
    """Train the run, unless it is there, and write its pages."""
    os.chdir(ROOT)
    command = [sys.executable, "-m", "rlt_lightning", "fit", *OPTIONS.split(), "--resume", "true"]
    subprocess.run(command, check=True)
    keep_files(Path("runs/example"))
    write_pages()


if __name__ == "__main__":
    main()
