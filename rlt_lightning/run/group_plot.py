"""The plot of groups of rows by reward, as an SVG file: `groups.svg`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 760, 420  # pixels
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 16, 52  # margins; the legend is on the right
COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#a6761d")
NUM_TICKS = 7  # at most, of the vertical axis
NUM_LABELS = 16  # at most, of the horizontal axis


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
    parts = [text(16, middle, "reward, nats", f'transform="rotate(-90 16 {middle})"')]
    parts += [text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, title)]
    for tick in ticks(axes.low, axes.high):
        parts += [f'<path stroke="#ddd" d="M{LEFT},{axes.y(tick):.1f}H{WIDTH - RIGHT}"/>']
        parts += [text(LEFT - 8, axes.y(tick) + 4, f"{tick:g}", 'text-anchor="end"')]
    every = math.ceil(len(groups) / NUM_LABELS)
    for place in range(0, len(groups), every):
        parts += [text(axes.x(place), HEIGHT - BOTTOM + 18, str(groups[place]))]
    return parts


def draw_legend(number: int, sample: str, name: str) -> list[str]:
    """Return an entry of the legend: a sample, which is the attributes of a path, and a name."""
    x, y = WIDTH - RIGHT + 16, TOP + 14 + 20 * number
    words = text(x + 30, y + 4, name, 'text-anchor="start"')
    return [f'<path transform="translate({x} {y})" {sample}/>', words]


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two bounds, 1, 2 or 5 times a power of ten apart."""
    power = 10.0 ** math.floor(math.log10((high - low) / NUM_TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= NUM_TICKS)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def text(x: float, y: float, words: str, options: str = "") -> str:
    """Return a text of the plot."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {options}>{escape(words)}</text>'
