"""Does the reward rise? First against last quarter of runs, from their rollouts.jsonl, with a plot.

python benchmarks/learning.py runs/quickstart_smollm2 runs/control --plot learning.svg
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import mean, variance
from typing import Any

Row = dict[str, Any]


def quarters(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Return the completions of the first and of the last quarter of the iterations."""
    last_step = max(row["step"] for row in rows)
    size = last_step // 4
    first = [row for row in rows if row["step"] <= size]
    last = [row for row in rows if row["step"] > last_step - size]
    return first, last


def rise(first: list[Row], last: list[Row], term: str) -> tuple[float, float]:
    """Return the difference of the mean term, last minus first, and its standard error.

    The quarters hold different problems, so the error is that of problems: of the means of their completions.
    """
    means = []
    for quarter in (first, last):
        groups: dict[int, list[float]] = defaultdict(list)
        for row in quarter:
            groups[row["row"]].append(row[term])
        means.append([mean(group) for group in groups.values()])
    before, after = means
    error = math.sqrt(variance(before) / len(before) + variance(after) / len(after))
    return mean(after) - mean(before), error


def report(folder: Path) -> tuple[list[float], str]:
    """Return the mean reward of every iteration, and a line of figures."""
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").open()]
    first, last = quarters(rows)
    difference, error = rise(first, last, "reward")
    parts = [f"reward {mean(r['reward'] for r in first):.2f} -> {mean(r['reward'] for r in last):.2f}"]
    parts.append(f"rise {difference:+.2f} +- {error:.2f} ({difference / error:+.1f} standard errors)")
    for term, name in (
        ("solution_log_prob_reward", "r_SS"),
        ("kl_reward", "r_KL"),
        ("format_reward", "format"),
    ):
        parts.append(f"{name} {rise(first, last, term)[0]:+.2f}")
    closed = [mean(row["finish_reason"] == "stop" for row in quarter) for quarter in (first, last)]
    parts.append(f"closed {closed[0]:.2f} -> {closed[1]:.2f}")
    steps = sorted({row["step"] for row in rows})
    curve = [mean(row["reward"] for row in rows if row["step"] == step) for step in steps]
    return curve, f"{folder.name}: " + ", ".join(parts)


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    parser.add_argument("--plot", type=Path, help="SVG file of the curves")
    arguments = parser.parse_args()
    curves = {}
    for folder in arguments.runs:
        curves[folder.name], line = report(folder)
        print(line)
    if arguments.plot:
        arguments.plot.write_text(svg(curves))


if __name__ == "__main__":
    main()
