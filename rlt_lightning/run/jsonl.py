"""JSONL files that a killed run leaves behind and a resumed run continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rlt_lightning.tags import escape_half_pairs
from rlt_lightning.types import InputError

JsonRow = dict[str, Any]


def append_rows(path: Path, rows: Iterable[JsonRow]) -> None:
    """Append rows in one write, so that a kill leaves at most one torn last line."""
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(map(format_line, rows)))


def format_line(row: JsonRow) -> str:
    """Return a row as a line; values that JSON does not know become text."""
    return escape_half_pairs(json.dumps(row, ensure_ascii=False, default=str)) + "\n"


def read_whole_rows(path: Path) -> Iterator[tuple[str, JsonRow]]:
    """Yield every complete line and its row; nothing if there is no file.

    Raises:
        InputError: If a line is no JSON, as can happen when the machine crashes.
    """
    if not path.exists():
        return
    # A kill may cut a character in two. Not splitlines(): it would also split inside JSON texts.
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InputError(
                    f"Every line of {path} must be JSON, but line {number} is not ({error}). Delete it and "
                    "all lines after it: the run makes their rows again."
                ) from error
            yield line, row


def read_json_rows(path: Path) -> Iterator[JsonRow]:
    """Yield the rows of a file, one at a time."""
    for _, row in read_whole_rows(path):
        yield row


def keep_rows(path: Path, is_kept: Callable[[JsonRow], bool]) -> None:
    """Drop rows that a resumed run repeats, and an incomplete last line; do nothing without a file."""
    if path.exists():
        rewrite(path, (line for line, row in read_whole_rows(path) if is_kept(row)))


def rewrite(path: Path, lines: Iterable[str]) -> None:
    """Replace the contents of a file in one step, so that a kill leaves the old or the new ones."""
    scratch = path.with_suffix(".tmp")
    with scratch.open("w", encoding="utf-8") as file:
        file.writelines(lines)
    scratch.replace(path)
