"""Divide a scored data set into groups of equal size by reward, and compare two traces of each problem."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle, pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rlt_lightning.run.jsonl import Row, format_line, rewrite
from rlt_lightning.types import InputError, Rollout

SHOWN = 5  # problems for each side of a comparison
SHOWN_CHARACTERS = 600  # of each trace there
# Of groups.svg.
WIDTH, HEIGHT = 760, 420  # pixels
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 16, 52  # margins; the legend is on the right
COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#a6761d")
NUM_TICKS = 7  # at most, of the vertical axis
NUM_LABELS = 16  # at most, of the horizontal axis


def split_into_groups(rewards: list[float], num_groups: int) -> list[list[int]]:
    """Divide rows by reward into groups whose sizes differ by one at most (RLT, arXiv:2506.08388, figure 4).

    Args:
        rewards: One per row, N.
        num_groups: Number of groups.

    Returns:
        Row positions, best group first, each by descending reward; equal rewards in the order of the rows.

    Raises:
        InputError: If there are fewer rows than groups.
    """
    if not 1 <= num_groups <= len(rewards):
        raise InputError(
            f"scores.rank_groups must be between 1 and the number of scored rows, {len(rewards)}, but is "
            f"{num_groups}. Lower it, or score more rows."
        )
    order = sorted(range(len(rewards)), key=lambda i: -rewards[i])
    bounds = [round(i * len(order) / num_groups) for i in range(num_groups + 1)]
    return [order[begin:end] for begin, end in pairwise(bounds)]


def write_groups(rows: list[Row], num_groups: int, terms: Sequence[str], folder: Path) -> None:
    """Write each group's rows, means of the terms and a plot: `groups/`, `groups.json`, `groups.svg`."""
    groups = [
        [rows[i] for i in group] for group in split_into_groups([row["reward"] for row in rows], num_groups)
    ]
    (folder / "groups").mkdir(exist_ok=True)
    for stale in (folder / "groups").glob("group-*.jsonl"):  # from an earlier run
        stale.unlink()
    figures = []
    for number, group in enumerate(groups, start=1):
        name = f"groups/group-{number:02d}.jsonl"
        rewrite(folder / name, map(format_line, group))
        means = {name: fmean(row[name] for row in group) for name in terms}
        own = [row["reward"] for row in group]
        bounds = {"reward_min": min(own), "reward_max": max(own)}
        figures.append({"group": number, "file": name, "num_rows": len(group), **means, **bounds})
    (folder / "groups.json").write_text(json.dumps(figures, indent=1) + "\n")
    plot_groups(figures, terms, folder / "groups.svg")


def write_comparison(
    rows: list[Row], rollouts: list[Rollout], columns: list[str], terms: Sequence[str], folder: Path
) -> None:
    """Compare two traces of each problem: write `comparison.jsonl`, largest difference first, and a page.

    Args:
        rows: Scored rows. `trace_column` names the trace; each problem has both, one after the other.
        rollouts: The scored texts, one per row.
        columns: The two trace columns.
        terms: The reward and its terms, columns of the scored rows.
        folder: Folder to write to.
    """
    scored = list(zip(rows, rollouts, strict=True))
    pairs = []
    for both in zip(scored[::2], scored[1::2], strict=False):  # a limited run may lack the last one
        assert [row["trace_column"] for row, _ in both] == columns
        problem = both[0][1].problem
        pair: Row = {"question": problem.question, "solution": problem.solution.strip()}
        pair["difference"] = both[0][0]["reward"] - both[1][0]["reward"]
        for column, (row, rollout) in zip(columns, both, strict=True):
            pair[column] = {name: row[name] for name in terms} | {"trace": rollout.text}
        pairs.append(pair)
    pairs.sort(key=lambda pair: -pair["difference"])
    rewrite(folder / "comparison.jsonl", map(format_line, pairs))
    (folder / "comparison.md").write_text(write_comparison_page(pairs, columns, terms))


def write_comparison_page(pairs: list[Row], columns: list[str], terms: Sequence[str]) -> str:
    """Return a page that says which trace is ahead, and where each leads by most (RLT, figure 5)."""
    differences = [pair["difference"] for pair in pairs]
    error = stdev(differences) / len(differences) ** 0.5 if len(pairs) > 1 else float("nan")
    ahead = sum(difference > 0 for difference in differences)
    lines = [
        f"# `{columns[0]}` against `{columns[1]}`",
        "",
        f"{len(pairs)} problems. Reward of `{columns[0]}` minus reward of `{columns[1]}`: "
        f"{fmean(differences):+.3f} ± {error:.3f} (standard error); `{columns[0]}` is ahead in {ahead}.",
    ]
    sides = ((columns[0], pairs[:SHOWN]), (columns[1], pairs[: -SHOWN - 1 : -1]))
    for column, shown in sides:
        lines += ["", f"## Where `{column}` is ahead the most"]
        for pair in shown:
            if (pair["difference"] > 0) != (column == columns[0]):
                continue
            lines += ["", f"### {pair['difference']:+.3f}", "", *quote(pair["question"])]
            for name in columns:
                figures = ", ".join(f"{term} {pair[name][term]:.3f}" for term in terms)
                lines += ["", f"`{name}`: {figures}", "", *quote(pair[name]["trace"])]
    return "\n".join(lines) + "\n"


def quote(text: str) -> list[str]:
    """Return a text as a Markdown quotation; a long one is cut."""
    shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " …"
    return [f"> {line}" for line in shown.strip().splitlines()]


@dataclass(frozen=True)
class Axes:
    """Where a group and a value lie in the picture.

    Args:
        num_groups: Number of groups, from left to right.
        low: The lowest value.
        high: The highest value.
    """

    num_groups: int
    low: float
    high: float

    def x(self, place: int) -> float:
        """Return the horizontal place of a group, pixels."""
        return LEFT + (WIDTH - LEFT - RIGHT) * (place + 0.5) / self.num_groups

    def y(self, value: float) -> float:
        """Return the vertical place of a value, pixels."""
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.high - value) / (self.high - self.low)

    def points(self, values: Sequence[float]) -> list[str]:
        """Return the points of a line with one value per group."""
        return [f"{self.x(place):.1f},{self.y(value):.1f}" for place, value in enumerate(values)]


def plot_groups(figures: list[dict[str, Any]], terms: Sequence[str], path: Path) -> None:
    """Draw the mean reward of every group, with its range and its terms.

    Args:
        figures: The entries of `groups.json`, one per group.
        terms: The reward and its terms, entries of the figures.
        path: File to write.
    """
    lines = {name: [row[name] for row in figures] for name in terms}
    lows, highs = ([row[name] for row in figures] for name in ("reward_min", "reward_max"))
    values = [*lows, *highs, *(value for line in lines.values() for value in line)]
    margin = 0.05 * (max(values) - min(values)) or 0.5
    axes = Axes(len(figures), min(values) - margin, max(values) + margin)
    sizes = " or ".join(map(str, sorted({row["num_rows"] for row in figures})))
    parts = ['<rect width="100%" height="100%" fill="#fff"/>']
    parts += draw_axes(
        axes, [row["group"] for row in figures], f"group by reward, best first ({sizes} rows each)"
    )
    area = 'fill="#1f77b4" fill-opacity="0.2"'
    parts += [f'<polygon {area} points="{" ".join(axes.points(highs) + axes.points(lows)[::-1])}"/>']
    parts += draw_legend(0, f'{area} d="M0,-5h22v10h-22z"', "reward, range")
    for number, (name, line, colour) in enumerate(
        zip(lines, lines.values(), cycle(COLOURS), strict=False), 1
    ):
        dashes = "" if name == "reward" else ' stroke-dasharray="5 4"'
        stroke = f'fill="none" stroke="{colour}" stroke-width="2"{dashes}'
        parts += [f'<polyline {stroke} points="{" ".join(axes.points(line))}"/>']
        for point in axes.points(line):
            x, y = point.split(",")
            parts += [f'<circle r="3" fill="{colour}" cx="{x}" cy="{y}"/>']
        parts += draw_legend(number, f'{stroke} d="M0,0h22"', f"{name}, mean")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
    head += f'height="{HEIGHT}" font-family="sans-serif" font-size="12" text-anchor="middle">'
    path.write_text("\n".join([head, *parts, "</svg>\n"]))


def draw_axes(axes: Axes, groups: Sequence[int], title: str) -> list[str]:
    """Return the grid, its figures, the numbers of the groups and the titles of both axes."""
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts = [draw_text(16, middle, "reward, nats", f'transform="rotate(-90 16 {middle})"')]
    parts += [draw_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, title)]
    for tick in choose_ticks(axes.low, axes.high):
        parts += [f'<path stroke="#ddd" d="M{LEFT},{axes.y(tick):.1f}H{WIDTH - RIGHT}"/>']
        parts += [draw_text(LEFT - 8, axes.y(tick) + 4, f"{tick:g}", 'text-anchor="end"')]
    every = math.ceil(len(groups) / NUM_LABELS)
    for place in range(0, len(groups), every):
        parts += [draw_text(axes.x(place), HEIGHT - BOTTOM + 18, str(groups[place]))]
    return parts


def draw_legend(number: int, sample: str, name: str) -> list[str]:
    """Return an entry of the legend: a sample, which is the attributes of a path, and a name."""
    x, y = WIDTH - RIGHT + 16, TOP + 14 + 20 * number
    words = draw_text(x + 30, y + 4, name, 'text-anchor="start"')
    return [f'<path transform="translate({x} {y})" {sample}/>', words]


def choose_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two bounds, 1, 2 or 5 times a power of ten apart."""
    power = 10.0 ** math.floor(math.log10((high - low) / NUM_TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= NUM_TICKS)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def draw_text(x: float, y: float, words: str, options: str = "") -> str:
    """Return a text of the plot."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {options}>{escape(words)}</text>'
