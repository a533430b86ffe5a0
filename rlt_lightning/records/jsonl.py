"""JSONL files that a killed run leaves behind and a resumed one goes on with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlt_lightning.types import InputError

Row = dict[str, Any]


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append rows in one write, so that a kill leaves at most one torn last line."""
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(map(to_line, rows)))


def to_line(row: Row) -> str:
    """A row as a line; what JSON lacks is written as text."""
    return json.dumps(row, ensure_ascii=False, default=str) + "\n"


def whole_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield every line that was written to its end, and its row; nothing if there is no file.

    Raises:
        InputError: If such a line is no JSON, as after a crash of the machine.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:  # a kill may tear a character too
        for number, line in enumerate(file, start=1):  # splitlines() would also split inside JSON texts
            if not line.endswith("\n"):
                return
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InputError(
                    f"Every line of {path} must be JSON, but line {number} is not ({error}). Delete it and "
                    "those after it: their rows are made anew."
                ) from error
            yield line, row


def rows_in(path: Path) -> Iterator[Row]:
    """The rows of a file, one at a time.

    Raises:
        InputError: If one is no object.
    """
    for _, row in whole_rows(path):
        if not isinstance(row, dict):
            raise InputError(
                f"Every line of {path} must be a JSON object, but one is {row!r:.40}. Delete it."
            )
        yield row


def rewrite(path: Path, lines: Iterable[str]) -> None:
    """Put these lines in place of a file, at once."""
    scratch = path.with_suffix(".tmp")
    with scratch.open("w", encoding="utf-8") as file:
        file.writelines(lines)
    scratch.replace(path)
