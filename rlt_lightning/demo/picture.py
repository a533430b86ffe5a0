"""Draw the students' accuracies beside the traces that they were trained on, as SVG without matplotlib.

The wheel has no matplotlib. The picture of `make finding`, by examples/finding/plots.py, needs it for the
curves, areas and groups below these bars.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from rlt_lightning.demo.figures import compute_interval
from rlt_lightning.demo.page import KIND_COLORS, mean_kinds, name_student
from rlt_lightning.run.ranking import draw_text

WIDTH = 860  # pixels
PANELS = ((220, 260), (550, 280))  # left edge and width of the accuracies and of the kinds
TOP, ROW, BAR, BOTTOM = 40, 44, 26, 64  # heights: title, a row with its bar, axis and legend


def draw_picture(figures: dict[str, Any], path: Path) -> None:
    """Draw one row per arm: held-out accuracy with its 95 % interval, and the kinds of its traces.

    Args:
        figures: What `collect` returns.
        path: File to write.
    """
    arms = figures["arms"]
    bottom = TOP + ROW * len(arms)
    parts = []
    titles = ("held-out problems solved, %", "the traces that it was trained on, %")
    for (left, width), title in zip(PANELS, titles, strict=True):
        parts += draw_axis(left, width, bottom, title)
    for number, (arm, found) in enumerate(arms.items()):
        y = TOP + ROW * number + (ROW - BAR) / 2
        parts += [draw_text(PANELS[0][0] - 12, y + BAR / 2 + 4, name_student(arm), 'text-anchor="end"')]
        mean, half = fmean(found["accuracy"]), compute_interval(found["accuracy"])
        parts += draw_accuracy(*PANELS[0], y, mean, half, "#2a6f97" if arm == "rlt" else "#9db4c0")
        parts += draw_kinds(found["kinds"], y) if "kinds" in found else []
    parts += draw_legend(bottom + 44)
    path.write_text(wrap_svg(parts, WIDTH, bottom + BOTTOM), encoding="utf-8")


def draw_axis(left: float, width: float, bottom: float, title: str) -> list[str]:
    """Return the title and the lines of a panel from 0 to 100 %."""
    parts = [draw_text(left, TOP - 16, title, 'font-weight="600"')]
    for percent in (0, 50, 100):
        x = left + width * percent / 100
        parts += [f'<path stroke="#ddd" d="M{x:.1f},{TOP - 4}V{bottom}"/>']
        parts += [draw_text(x, bottom + 16, str(percent), 'text-anchor="middle" fill="#555"')]
    return parts


def draw_accuracy(left: float, width: float, y: float, mean: float, half: float, color: str) -> list[str]:
    """Return a bar, its interval and its figure.

    Args:
        left: Left edge of the panel, pixels.
        width: What 100 % are, pixels.
        y: Top of the bar, pixels.
        mean: The accuracy, percent.
        half: Half of its interval, percent points.
        color: Of the bar.
    """
    low, high = (left + width * min(max(end, 0), 100) / 100 for end in (mean - half, mean + half))
    middle = y + BAR / 2
    return [
        draw_bar(left, y, width * mean / 100, color),
        f'<path stroke="#333" d="M{low:.1f},{middle}H{high:.1f}"/>',
        *(f'<path stroke="#333" d="M{end:.1f},{middle - 4}v8"/>' for end in (low, high)),
        draw_text(high + 6, middle + 4, f"{mean:.0f}", 'font-weight="600"'),
    ]


def wrap_svg(parts: list[str], width: float, height: float) -> str:
    """Return a picture of these parts on white."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
    head += f'height="{height}" font-family="sans-serif" font-size="13">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>\n"])


def draw_kinds(per_seed: list[dict[str, float]], y: float) -> list[str]:
    """Return the shares of the kinds of traces as one stacked bar."""
    (left, width), parts = PANELS[1], []
    x = float(left)
    for kind, share in mean_kinds(per_seed).items():
        parts.append(draw_bar(x, y, width * share / 100, KIND_COLORS[kind]))
        x += width * share / 100
    return parts


def draw_legend(y: float) -> list[str]:
    """Return the colours of the kinds with their names."""
    x, parts = PANELS[1][0], []
    for kind, color in KIND_COLORS.items():
        parts += [
            f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{color}"/>',
            draw_text(x + 14, y, kind),
        ]
        x += 58
    return parts


def draw_bar(x: float, y: float, width: float, color: str) -> str:
    """Return a horizontal bar."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" fill="{color}"/>'
