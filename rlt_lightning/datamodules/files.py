"""Read the rows of one file: JSONL, JSON, Parquet or CSV."""

from __future__ import annotations

import contextlib
import csv
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlt_lightning.datamodules.bad_rows import NumberedRow
from rlt_lightning.datamodules.hub import SOURCE_CHOICES, one_line
from rlt_lightning.models.announce import announce_reading
from rlt_lightning.types import BadRowError, BadRowReason, InputError

PARQUET_ROWS = 1000  # that are in memory at a time


def read_file(path: Path) -> Iterator[NumberedRow]:
    """Yield the rows of a file, numbered from 1; in a JSONL file by its lines.

    Raises:
        InputError: If it is of another kind, or cannot be read as a whole.
    """
    if path.suffix not in READERS:
        raise InputError(
            f"The data file must be {', '.join(READERS)}, but is {path}. Convert it, or use {SOURCE_CHOICES}."
        )
    announce_reading(path)
    with readable(path):
        yield from READERS[path.suffix](path)


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn a failure to read a file into one line."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"The data file {path} must be readable, but is not ({one_line(error)}). Check its permissions, "
            "its encoding (UTF-8), and that it is complete."
        ) from error


def _read_jsonl(path: Path) -> Iterator[NumberedRow]:
    """Read one row per line. A broken line is a bad row; blank lines count, but are not rows."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, columns_of(json.loads(line))
            except (ValueError, RecursionError) as error:
                yield number, BadRowError(BadRowReason.BROKEN_JSON, str(error))


def _read_json(path: Path) -> Iterator[NumberedRow]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"The file {path} must be valid JSON, but is not ({error}). Correct it; if it holds one object "
            "per line, name it .jsonl."
        ) from error
    if isinstance(content, dict):
        content = content.get("data")
    if not isinstance(content, list):
        raise InputError(
            f'The file {path} must hold a list of objects or {{"data": [...]}}, but holds neither. Convert '
            "it to one of them, or to .jsonl."
        )
    for number, value in enumerate(content, start=1):
        yield number, columns_of(value)


def _read_parquet(path: Path) -> Iterator[NumberedRow]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            batches = file.iter_batches(PARQUET_ROWS)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
    except pyarrow.ArrowException as error:
        raise InputError(
            f"The file {path} must be a whole Parquet file, but is not ({one_line(error)}). Write it "
            f"again, or use {SOURCE_CHOICES}."
        ) from error


def _read_csv(path: Path) -> Iterator[NumberedRow]:
    """Read a table whose first line names the columns; every cell is text, even if it looks like a number."""
    # A reasoning trace is longer than the default allows.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            for number, row in enumerate(csv.DictReader(file, strict=True), start=1):
                if None in row or None in row.values():
                    detail = "the row has more or fewer cells than the header"
                    yield number, BadRowError(BadRowReason.WRONG_TYPE, detail)
                else:
                    yield number, dict(row)
        except csv.Error as error:
            raise InputError(
                f"The file {path} must be valid CSV, but is not ({error}). Correct it, or convert it "
                "to .jsonl."
            ) from error


READERS: dict[str, Callable[[Path], Iterator[NumberedRow]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}


def columns_of(value: Any) -> dict[str, Any] | BadRowError:
    """Return a row's columns, or why it has none."""
    if isinstance(value, dict):
        return value
    return BadRowError(BadRowReason.WRONG_TYPE, f"a row must be an object, but is {type(value).__name__}")
