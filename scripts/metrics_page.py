"""Write the tables of docs/metrics.md, which list our metrics: `python scripts/metrics_page.py`.

A table stands between two comments, and the text around it is written by hand:

    <!-- catalogue: reward -->
    | name | meaning | … |
    <!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from rlt_lightning.metrics.catalogue import (
    COLUMNS,
    OURS,
    Column,
    Metric,
    build_student_metrics,
    validation_name,
)

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
MARKED = re.compile(r"(<!-- catalogue: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def write_tables(text: str) -> str:
    """Return a page with every marked table as the catalogue gives it."""
    return MARKED.sub(lambda found: f"{found[1]}\n{write_table(found[2])}\n{found[3]}", text)


def write_table(name: str) -> str:
    """Return a table in Markdown.

    Args:
        name: `rollouts.jsonl`, `responses.jsonl`, `students`, or a table of metrics: a prefix or a
            `Metric.table`.

    Raises:
        ValueError: If there is no such table.
    """
    if name == "responses.jsonl":
        return write_markdown(
            ("column", "meaning"), ((f"`{c.name}`", c.meaning) for c in COLUMNS["response"])
        )
    if name == "rollouts.jsonl":
        columns = (*COLUMNS["completion"], *list_figure_columns(), *COLUMNS["tokens"])
        return write_markdown(("column", "meaning"), ((f"`{c.name}`", c.meaning) for c in columns))
    if name == "students":
        return write_student_metrics()
    found = [metric for metric in OURS if (metric.table or metric.prefix) == name]
    if not found:
        raise ValueError(
            f"A table must have metrics, but the catalogue has none for {name!r}. Correct the mark."
        )
    return write_metric_table(found)


def write_column_table(columns: Iterable[Column]) -> str:
    """Return a table of columns."""
    return write_markdown(("column", "meaning"), ((f"`{c.name}`", c.meaning) for c in columns))


def list_figure_columns() -> list[Column]:
    """Return the columns of completions whose means are metrics."""
    found = [metric for metric in OURS if metric.column]
    return [Column(metric.column, f"`{metric.name}` of this completion") for metric in found]


def write_metric_table(found: list[Metric]) -> str:
    """Return a table of metrics, and below it those that are logged on held-out problems too."""
    says = any(metric.logged_by for metric in found)
    header = ("name", *(["logged by"] if says else []), "meaning", "unit", "healthy; what a bad value says")
    table = write_markdown(header, (write_row(metric, says) for metric in found))
    held_out = [metric for metric in found if metric.held_out is not None]
    if not held_out:
        return table
    sentences = [f"On held-out problems: {', '.join(f'`{validation_name(m.name)}`' for m in held_out)}."]
    sentences += [
        f"`{validation_name(m.name)}` {m.held_out}." for m in held_out if m.held_out != f"as `{m.name}`"
    ]
    return f"{table}\n{' '.join(sentences)}\n"


def write_student_metrics() -> str:
    """Return a sentence of the metrics that each of several students has."""
    names = [f"`{metric.name}`" for metric in build_student_metrics("STUDENT")]
    held_out = [
        f"`{validation_name(metric.name)}`"
        for metric in build_student_metrics("STUDENT")
        if metric.held_out is not None
    ]
    return f"{', '.join(names)}; on held-out problems {', '.join(held_out)}.\n"


def write_row(metric: Metric, says_who: bool) -> tuple[str, ...]:
    """Return the cells of a metric's row."""
    unit = ", ".join(filter(None, (metric.unit, metric.bounds)))
    logged = [metric.logged_by] if says_who else []
    return (f"`{metric.name}`", *logged, metric.meaning, unit, metric.healthy)


def write_markdown(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [" | ".join(header), *(" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows)]
    lines = [f"| {line} |\n" for line in lines]
    lines.insert(1, "|" + "---|" * len(header) + "\n")
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(write_tables(PAGE.read_text()))
