"""Format the results of an evaluation as tables, next to the paper's results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlt_lightning.datamodules.evaluation_sets import SETS, explain_difference

PAPER_SETS = ("aime24", "math500", "gpqa_diamond")
PAPER_SOURCE = "Table 1 of arXiv:2506.08388, pass@1 in %, as published"
# Model, size of its data, and percent for each set and their mean.
PAPER_ROWS: tuple[tuple[str, str, tuple[float, float, float, float]], ...] = (
    ("QwQ-32B", "N.A.", (50.00, 90.60, 54.50, 65.03)),
    ("DeepSeek-R1", "800K+", (79.80, 97.30, 71.50, 82.87)),
    ("Qwen2.5-7B-Instruct", "N.A.", (10.00, 74.20, 33.30, 39.17)),
    ("Bespoke-7B-1K", "1K", (13.30, 80.00, 33.80, 42.37)),
    ("RLT-7B-1K", "1K", (20.00, 80.40, 41.90, 47.43)),
    ("Bespoke-7B", "17K", (20.00, 82.00, 37.80, 46.60)),
    ("RLT-7B", "17K", (23.30, 82.80, 42.40, 49.50)),
    ("Qwen2.5-32B-Instruct", "N.A.", (26.70, 84.00, 49.00, 53.23)),
    ("s1-32B", "1K", (50.00, 92.60, 56.60, 66.40)),
    ("s1-32B + budget forcing", "1K", (56.70, 93.00, 59.60, 69.77)),
    ("Bespoke-32B-1K", "1K", (46.70, 92.60, 57.50, 65.60)),
    ("RLT-32B-1K", "1K", (60.00, 94.00, 60.10, 71.37)),
    ("Sky-T1-32B", "17K", (43.30, 82.40, 56.80, 60.83)),
    ("Bespoke-32B", "17K", (63.30, 93.00, 58.10, 71.47)),
    ("RLT-32B", "17K", (66.70, 93.40, 59.60, 73.23)),
)
PERCENTAGES = ("pass_at_k", "maj_at_k", "formatted_frac", "truncated_frac")
HEADER = (
    *("set", "problems", "k", "pass@1, % ± s.e."),
    *("pass@k, %", "maj@k, %", "formatted, %", "cut off, %"),  # as PERCENTAGES
    "tokens",
)


def render(summary: dict[str, Any]) -> str:
    """Return the results as a Markdown page, next to the paper's for the sets that it reports."""
    name, sets = summary["model"] or summary["responses"], summary["sets"]
    page = f"# Evaluation of {name}\n\n{render_table([HEADER, *map(build_result_row, sets.values())])}"
    page += f"\nJudged by {summary['judge']}.\n"
    comparable = find_comparable_sets(summary)
    if comparable:
        page += f"\nBeside {PAPER_SOURCE}:\n\n{build_comparison(summary, name)}"
    lines = [explain_difference(key, found["differs"]) for key, found in sets.items() if found.get("differs")]
    lines += [
        f"{SETS[key].title} is recognised only by the number of its rows."
        for key in PAPER_SETS
        if key in comparable and sets[key].get("known_by_number")
    ]
    return page + "".join(f"\n{line}\n" for line in lines)


def find_comparable_sets(summary: dict[str, Any]) -> set[str]:
    """Return the names of the evaluated sets whose results are comparable with the paper's."""
    found = summary["sets"]
    return {name for name in PAPER_SETS if name in found and not found[name].get("differs")}


def build_result_row(found: dict[str, Any]) -> tuple[str, ...]:
    """Return one set's results, in the columns of `HEADER`."""
    tokens = found.get("tokens_mean")
    return (
        found["title"],
        str(found["num_problems"]),
        str(found["num_samples"]),
        format_accuracy(found),
        *(format_percent(found.get(name)) for name in PERCENTAGES),
        "" if tokens is None else f"{tokens:.0f}",
    )


def build_paper_table() -> list[tuple[str, ...]]:
    """Return Table 1 of the paper as rows of text, the header first."""
    header = ("model", "data", *(SETS[key].title for key in PAPER_SETS), "overall")
    rows = ((model, size, *(f"{value:.2f}" for value in values)) for model, size, values in PAPER_ROWS)
    return [header, *rows]


def build_comparison(summary: dict[str, Any], name: str) -> str:
    """Return the paper's Table 1 with the run as its last row; sets that are not the paper's stay empty."""
    header, *rows = build_paper_table()
    comparable = find_comparable_sets(summary)
    own = [format_accuracy(summary["sets"][key]) if key in comparable else "" for key in PAPER_SETS]
    overall = (
        format_accuracy(summary["overall"]) if comparable == set(summary["sets"]) == set(PAPER_SETS) else ""
    )
    return render_table([header, *rows, (f"**{name}**", "", *own, overall)])


def format_accuracy(found: dict[str, Any]) -> str:
    """Return pass@1 with its standard error, in percent."""
    error = found["standard_error"]
    return format_percent(found["pass_at_1"]) + ("" if error is None else f" ± {format_percent(error)}")


def format_percent(value: float | None) -> str:
    """Return a fraction as a percentage."""
    return "" if value is None else f"{100 * value:.1f}"


def render_table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table whose columns also line up in a terminal."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines.insert(1, ["-" * width for width in widths])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
