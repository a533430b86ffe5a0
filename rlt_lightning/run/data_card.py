"""The card of a distillation set: how it was made, what it holds, and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median, pstdev
from typing import Any

from rlt_lightning.run.jsonl import Row
from rlt_lightning.version import __version__

EXPLANATIONS = (
    "Explanations of a Reinforcement-Learned Teacher",
    "Each row has a `question`, its `solution` and the teacher's `reasoning_trace`, with the terms of "
    "its reward (RLT, arXiv:2506.08388, section 3.3), and the same text as `system` and "
    "`conversations` in the form of Bespoke-Stratos-17k. Rows with the same `row` are of one problem.",
)
ANSWERS = (
    "A model's own right answers",
    "Each row has a `question`, and the thought (`reasoning_trace`) and `solution` of an answer that the "
    "model sampled and that was judged right by the column `answer`. `pass_rate` is the part of the "
    "problem's sampled answers that were right. The same text is there as `system` and `conversations` in "
    "the form of Bespoke-Stratos-17k. Rows with the same `row` are of one problem.",
)


def write_data_card(
    kind: tuple[str, str],
    metadata: dict[str, Any],
    counts: dict[str, Any],
    selected: list[Row],
    terms: Sequence[str],
    file_name: str,
) -> str:
    """Return the card as Markdown, with the header by which `datasets.load_dataset(FOLDER)` finds the rows.

    Args:
        kind: EXPLANATIONS or ANSWERS: the title, and what a row is.
        metadata: Settings that the traces were made with, by name.
        counts: How many there are of what, by name.
        selected: The rows of the set.
        terms: Columns whose figures are shown, beside lengths.
        file_name: File of the set, beside the card.
    """
    from huggingface_hub import DatasetCardData

    title, about = kind
    header = DatasetCardData(
        configs=[{"config_name": "default", "data_files": file_name}],
        tags=["rlt_lightning", "reasoning", "distillation"],
    )
    lines = [
        f"---\n{header.to_yaml()}\n---",
        f"# {title}",
        "",
        about,
        "",
        "## Recipe",
        "",
        *write_table({**metadata, "made with": f"rlt_lightning {__version__}"}),
        "",
        "## Counts",
        "",
        *write_table(counts),
        "",
        "## Figures of this set",
        "",
        "| | mean | standard deviation | least | median | most |",
        "|---|---|---|---|---|---|",
    ]
    for name in (*terms, "num_tokens", "student_tokens"):
        values = [row[name] for row in selected]
        figures = fmean(values), pstdev(values), min(values), median(values), max(values)
        lines.append(f"| `{name}` | " + " | ".join(f"{value:.4g}" for value in figures) + " |")
    return "\n".join(lines) + "\n"


def write_table(entries: dict[str, Any]) -> list[str]:
    """Return the lines of a Markdown table with two columns."""
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in entries.items())]
