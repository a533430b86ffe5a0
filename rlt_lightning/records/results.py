"""Results of an evaluation as a table, beside the paper's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlt_lightning.datamodules.evaluation_sets import SETS

PAPER_SETS = ("aime24", "math500", "gpqa_diamond")
PAPER_ROWS: tuple[
    tuple[str, str, tuple[float, float, float, float]], ...
] = (  # percent; the last is the mean
    ("Qwen2.5-7B-Instruct", "", (10.00, 74.20, 33.30, 39.17)),
    ("Bespoke-7B-1K", "1K", (13.30, 80.00, 33.80, 42.37)),
    ("RLT-7B-1K", "1K", (20.00, 80.40, 41.90, 47.43)),
    ("Bespoke-7B", "17K", (20.00, 82.00, 37.80, 46.60)),
    ("RLT-7B", "17K", (23.30, 82.80, 42.40, 49.50)),
    ("Qwen2.5-32B-Instruct", "", (26.70, 84.00, 49.00, 53.23)),
    ("s1-32B + budget forcing", "1K", (56.70, 93.00, 59.60, 69.77)),
    ("RLT-32B-1K", "1K", (60.00, 94.00, 60.10, 71.37)),
    ("Bespoke-32B", "17K", (63.30, 93.00, 58.10, 71.47)),
    ("RLT-32B", "17K", (66.70, 93.40, 59.60, 73.23)),
)
HEADER = (
    "set",
    "problems",
    "k",
    "pass@1, % ± s.e.",
    "pass@k, %",
    "maj@k, %",
    "formatted, %",
    "cut off, %",
    "tokens",
)


def without_nan(value: Any) -> Any:
    """Replace NaN, which JSON does not know, by None."""
    if isinstance(value, dict):
        return {name: without_nan(item) for name, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def render(summary: dict[str, Any]) -> str:
    """The results as a Markdown page; beside the paper's, where they are of its sets."""
    name = summary["model"] or summary["responses"]
    page = f"# Evaluation of {name}\n\n{markdown([HEADER, *map(result_row, summary['sets'].values())])}"
    if set(PAPER_SETS) & set(summary["sets"]):
        page += "\nBeside Table 1 of arXiv:2506.08388, pass@1 in %, as published:\n\n"
        page += beside_paper(summary, name)
    return page


def result_row(found: dict[str, Any]) -> tuple[str, ...]:
    """One set's results, under `HEADER`."""
    tokens = found.get("tokens_mean")
    return (
        found["title"],
        str(found["num_problems"]),
        str(found["num_samples"]),
        accuracy(found),
        percent(found["pass_at_k"]),
        percent(found["maj_at_k"]),
        percent(found["formatted_frac"]),
        percent(found.get("truncated_frac")),
        "" if tokens is None else f"{tokens:.0f}",
    )


def beside_paper(summary: dict[str, Any], name: str) -> str:
    """The paper's Table 1 with the run as its last row."""
    header = ("model", "data", *(SETS[key].title for key in PAPER_SETS), "overall")
    rows = [(model, size, *(f"{value:.1f}" for value in values)) for model, size, values in PAPER_ROWS]
    found = [summary["sets"].get(key) for key in PAPER_SETS]
    own = [accuracy(part) if part else "" for part in found]
    overall = accuracy(summary["overall"]) if set(summary["sets"]) == set(PAPER_SETS) else ""
    return markdown([header, *rows, (f"**{name}**", "", *own, overall)])


def accuracy(found: dict[str, Any]) -> str:
    """pass@1 with its standard error, in percent."""
    error = found["standard_error"]
    return percent(found["pass_at_1"]) + ("" if error is None else f" ± {percent(error)}")


def percent(value: float | None) -> str:
    """A part as a percentage."""
    return "" if value is None else f"{100 * value:.1f}"


def markdown(rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table whose columns also line up in a terminal."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines.insert(1, ["-" * width for width in widths])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
