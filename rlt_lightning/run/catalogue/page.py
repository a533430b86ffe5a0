"""Write the tables of docs/metrics.md: `python -m rlt_lightning.run.catalogue.page docs/metrics.md`.

A table stands between two comments, and the text around it is written by hand:

    <!-- catalogue: reward -->
    | name | meaning | … |
    <!-- end -->
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from rlt_lightning.run.catalogue.columns import COMPLETION, RESPONSE, TOKENS
from rlt_lightning.run.catalogue.entry import Column, Metric
from rlt_lightning.run.catalogue.registry import held_out, metrics
from rlt_lightning.run.catalogue.rewards import of_student

MARKED = re.compile(r"(<!-- catalogue: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """Return a page with every marked table as the catalogue gives it."""
    return MARKED.sub(lambda found: f"{found[1]}\n{table(found[2])}\n{found[3]}", text)


def table(name: str) -> str:
    """Return a table in Markdown.

    Args:
        name: `rollouts.jsonl`, `responses.jsonl`, `students`, or a table of metrics: a prefix or a
            `Metric.table`.

    Raises:
        ValueError: If there is no such table.
    """
    if name == "responses.jsonl":
        return markdown(("column", "meaning"), ((f"`{c.name}`", c.meaning) for c in RESPONSE))
    if name == "rollouts.jsonl":
        columns = (*COMPLETION, *figure_columns(), *TOKENS)
        return markdown(("column", "meaning"), ((f"`{c.name}`", c.meaning) for c in columns))
    if name == "students":
        return metric_table(list(of_student("STUDENT")))
    found = [metric for metric in metrics() if (metric.table or metric.prefix) == name]
    if not found:
        raise ValueError(
            f"A table must have metrics, but the catalogue has none for {name!r}. Correct the mark."
        )
    return metric_table(found)


def figure_columns() -> list[Column]:
    """Return the columns of completions whose means are metrics."""
    found = [metric for metric in metrics() if metric.column]
    return [
        Column(metric.column, f"value of this completion; the mean is `{metric.name}`") for metric in found
    ]


def metric_table(found: list[Metric]) -> str:
    """Return a table of metrics, those on held-out problems last."""
    says = any(metric.logged_by for metric in found)
    rows = [row_of(metric, says) for metric in found]
    for metric in found:
        if metric.held_out is not None:
            name, *logged, _, unit, _ = row_of(metric, says)
            name = f"`{held_out(metric.name)}`"
            rows.append((name, *logged, f"`{metric.name}` on held-out problems", unit, metric.held_out))
    header = ("name", *(["logged by"] if says else []), "meaning", "unit", "healthy; what a bad value says")
    return markdown(header, rows)


def row_of(metric: Metric, says_who: bool) -> tuple[str, ...]:
    """Return the cells of a metric's row."""
    unit = ", ".join(filter(None, (metric.unit, metric.bounds)))
    logged = [metric.logged_by] if says_who else []
    return (f"`{metric.name}`", *logged, metric.meaning, unit, metric.healthy)


def markdown(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [" | ".join(header), *(" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows)]
    lines = [f"| {line} |\n" for line in lines]
    lines.insert(1, "|" + "---|" * len(header) + "\n")
    return "".join(lines)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(with_tables(path.read_text()))
