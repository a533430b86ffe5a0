"""What the report takes from one row of completions, whichever verb wrote it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from types import NoneType
from typing import Any

from rlt_lightning.datamodules.rows import TRACE_COLUMN, parse_row
from rlt_lightning.run.jsonl import Row
from rlt_lightning.run.metrics import COLUMNS, label_columns
from rlt_lightning.tags import R1, STRATOS
from rlt_lightning.types import BadRowError

COMPLETION_FILES = ("rollouts.jsonl", "traces.jsonl", "scores.jsonl")
NO_FIGURES = {
    column.name for column in COLUMNS["completion"]
}  # numbers among them say where a row comes from
TOKEN_COLUMNS = tuple(column.name for column in COLUMNS["tokens"])
NUMBER_SIZE = 8  # characters of a token's figure on the page, about


def texts_of(row: Row, file: str) -> tuple[str, str, str]:
    """Return question, solution and explanation of a completion."""
    column = "explanation" if file == "rollouts.jsonl" else row.get("trace_column", TRACE_COLUMN)
    texts = [row.get(name) for name in ("question", "solution", column)]
    if all(isinstance(text, str) for text in texts):
        question, solution, explanation = map(str, texts)
        return question, solution.strip(), explanation
    for tags in (STRATOS, R1):
        with suppress(BadRowError):
            parsed = parse_row(row, tags, (column,), allows_completion=True)
            trace = (column == TRACE_COLUMN and parsed.completion) or parsed.traces[column].strip()
            return parsed.question, parsed.solution.strip(), trace
    # A conversation in tags that we do not know is shown as it is.
    return "", "", json.dumps(row.get("conversations", ""), ensure_ascii=False)


def step_of(row: Row, file: str) -> int | None:
    """Return the iteration of a completion; only in rollouts.jsonl is the column `step` one."""
    step = row.get("step") if file == "rollouts.jsonl" else None
    return step if isinstance(step, int) else None


def figures_of(row: Row, file: str) -> dict[str, float | None]:
    """Return the numbers that say something about a completion; None for a number that is not finite.

    Rows of a predict run also hold the columns of the source, so only columns of the catalogue count there.
    """
    ours = (name for name in row if name not in NO_FIGURES) if file == "rollouts.jsonl" else label_columns()
    found = {name: float(row[name]) for name in ours if isinstance(row.get(name), (int, float))}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def size_of(row: Row, text: str) -> int:
    """Return how many characters a completion takes on the page, about: its text and its tokens."""
    if not has_tokens(row):
        return len(text)
    tokens = (*row["thought_tokens"], *row["solution_tokens"])
    return len(text) + sum(len(token) + NUMBER_SIZE for token in tokens)


def has_tokens(row: Row) -> bool:
    """Return whether a row has all four columns of tokens, with a figure for each token."""
    for names, kinds in ((TOKEN_COLUMNS[::2], str), (TOKEN_COLUMNS[1::2], (int, float, NoneType))):
        for column in map(row.get, names):
            if not isinstance(column, list) or not all(isinstance(value, kinds) for value in column):
                return False
    return all(
        len(row[texts]) == len(row[values]) for texts, values in (TOKEN_COLUMNS[:2], TOKEN_COLUMNS[2:])
    )


def completion_of(row: Row, file: str, problems: dict[tuple[str, str], int]) -> Row:
    """Return a completion as the page takes it.

    Args:
        row: The row as it was written.
        file: Name of its file.
        problems: Number of each problem, by question and solution.
    """
    question, solution, text = texts_of(row, file)
    return {
        "problem": problems[question, solution],
        "step": step_of(row, file),
        "number": row.get("completion", row.get("trace")) if file != "scores.jsonl" else None,
        "column": row.get("trace_column"),
        "finish": row.get("finish_reason"),
        "text": text,
        "figures": figures_of(row, file),
        "tokens": {name: list(numbers_or_texts(row[name])) for name in TOKEN_COLUMNS}
        if has_tokens(row)
        else None,
    }


def numbers_or_texts(values: list[Any]) -> Iterator[Any]:
    """Yield a column of tokens for the page: numbers in few digits, None for one that is not finite."""
    for value in values:
        if isinstance(value, str):
            yield value
        else:
            yield round(float(value), 4) if value is not None and math.isfinite(value) else None
