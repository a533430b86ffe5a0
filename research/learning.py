"""Does the reward rise? Explanations of the same problems before and after training, with a plot of the runs.

python research/learning.py runs/warmup_traces runs/rlt_traces runs/control_traces \\
  --runs runs/smollm2_rlt runs/control --plot learning.svg
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any

Row = dict[str, Any]


def rows_of(path: Path) -> list[Row]:
    """Read a JSONL file."""
    return [json.loads(line) for line in path.open()]


def rise(before: list[Row], after: list[Row], term: str) -> tuple[float, float]:
    """Return the mean difference of a term, after minus before, and its standard error over problems."""
    if [row["question"] for row in before] != [row["question"] for row in after]:
        raise SystemExit("Both must explain the same problems in the same order: are the runs finished?")
    differences = [b[term] - a[term] for a, b in zip(before, after, strict=True)]
    return mean(differences), stdev(differences) / math.sqrt(len(differences))


def report(before: list[Row], after: list[Row]) -> str:
    """Return a line of figures that compares explanations before and after training."""
    difference, error = rise(before, after, "reward")
    parts = [f"reward {mean(r['reward'] for r in before):.2f} -> {mean(r['reward'] for r in after):.2f}"]
    parts.append(f"rise {difference:+.2f} +- {error:.2f} ({difference / error:+.1f} standard errors)")
    for term, name in (
        ("solution_reward", "r_SS"),
        ("kl_reward", "r_KL"),
        ("format_reward", "format"),
    ):
        parts.append(f"{name} {rise(before, after, term)[0]:+.2f}")
    closed = [mean(row["closed"] for row in rows) for rows in (before, after)]
    parts.append(f"closed {closed[0]:.2f} -> {closed[1]:.2f}")
    return ", ".join(parts)


def curve(run: Path) -> list[float]:
    """Return the mean reward of every iteration of a run."""
    rows = rows_of(run / "rollouts.jsonl")
    steps = sorted({row["step"] for row in rows})
    return [mean(row["reward"] for row in rows if row["step"] == step) for step in steps]


def svg(curves: dict[str, list[float]]) -> str:
    """Draw mean reward against iteration, one line per run."""
    values = [value for curve in curves.values() for value in curve]
    low, high, steps = min(values), max(values), max(map(len, curves.values()))

    def place(i: int, value: float) -> str:
        return f"{60 + 520 * i / max(1, steps - 1):.1f},{260 - 220 * (value - low) / (high - low or 1):.1f}"

    colors = ("#0b6e99", "#b35900", "#555555")
    shapes = []
    for n, ((name, curve), color) in enumerate(zip(curves.items(), colors, strict=False)):
        points = " ".join(place(i, value) for i, value in enumerate(curve))
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        shapes.append(f'<text x="{70 + 200 * n}" y="25" fill="{color}">{name}</text>')
    axes = f'<text x="8" y="45">{high:.1f}</text><text x="8" y="263">{low:.1f}</text>'
    axes += f'<text x="60" y="290">1</text><text x="570" y="290">{steps}</text>'
    axes += '<text x="270" y="290">iteration</text><text x="8" y="150">reward</text>'
    style = 'font-family="sans-serif" font-size="14" style="background:#fff"'
    frame = '<rect width="620" height="300" fill="#fff"/><path d="M60 40V265H590" fill="none" stroke="#888"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 620 300" {style}>'
    return head + frame + axes + "".join(shapes) + "</svg>\n"


def main() -> None:
    """Print the rises, and draw the curves if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "traces",
        type=Path,
        nargs="+",
        help="folders of `rlt predict`: with the teacher before training, then with trained teachers",
    )
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="run folders of the training")
    parser.add_argument("--plot", type=Path, help="SVG file of the runs' curves")
    options = parser.parse_args()
    before = rows_of(options.traces[0] / "traces.jsonl")
    for folder in options.traces[1:]:
        print(f"{folder.name}: {report(before, rows_of(folder / 'traces.jsonl'))}")
    if options.plot:
        options.plot.write_text(svg({run.name: curve(run) for run in options.runs}))


if __name__ == "__main__":
    main()
