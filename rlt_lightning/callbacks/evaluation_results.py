"""Format the results of an evaluation as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PERCENTAGES = ("pass_at_k", "maj_at_k", "formatted_frac", "truncated_frac")
HEADER = (
    *("set", "problems", "k", "pass@1, % ± s.e."),
    *("pass@k, %", "maj@k, %", "formatted, %", "cut off, %"),  # as PERCENTAGES
    "tokens",
)


def render(summary: dict[str, Any]) -> str:
    """Return the results as a Markdown page."""
    name, sets = summary["model"], summary["sets"]
    table = render_table([HEADER, *map(build_result_row, sets.values())])
    return f"# Evaluation of {name}\n\n{table}\nJudged by {summary['judge']}.\n"


def build_result_row(results: dict[str, Any]) -> tuple[str, ...]:
    """Return one set's results, in the columns of `HEADER`."""
    tokens = results.get("tokens_mean")
    return (
        results["title"],
        str(results["num_problems"]),
        str(results["num_samples"]),
        format_accuracy(results),
        *(format_percent(results.get(name)) for name in PERCENTAGES),
        "" if tokens is None else f"{tokens:.0f}",
    )


def format_accuracy(results: dict[str, Any]) -> str:
    """Return pass@1 with its standard error, in percent."""
    error = results["standard_error"]
    return format_percent(results["pass_at_1"]) + ("" if error is None else f" ± {format_percent(error)}")


def format_percent(value: float | None) -> str:
    """Return a fraction as a percentage."""
    return "" if value is None else f"{100 * value:.1f}"


def render_table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table whose columns also line up in a terminal."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines.insert(1, ["-" * width for width in widths])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
