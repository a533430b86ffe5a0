"""Read rows from an embedded set, a file, a folder or the hub."""

from __future__ import annotations

import csv
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rlt_lightning.datamodules import chains, word_sums
from rlt_lightning.datamodules.arithmetic import KINDS, arithmetic_rows
from rlt_lightning.datamodules.bad_rows import BadRowError, BadRowReason, NumberedRow
from rlt_lightning.datamodules.countdown import countdown_rows
from rlt_lightning.datamodules.rows import complete_countdown
from rlt_lightning.models.announce import announce, announce_reading
from rlt_lightning.types import InputError

ARITHMETIC = "arithmetic"
# Each makes its rows from a number of rows, a seed and a split.
EMBEDDED: dict[str, Callable[[int, int, str], list[dict[str, Any]]]] = {
    ARITHMETIC: arithmetic_rows,
    "countdown": countdown_rows,
    **{f"{ARITHMETIC}:{kind}": partial(arithmetic_rows, kind=kind) for kind in KINDS},
    **chains.SOURCES,
    **word_sums.SOURCES,
}
SOURCE_CHOICES = (
    f"'{ARITHMETIC}' (the default), '{ARITHMETIC}:KIND' such as '{ARITHMETIC}:addition', 'chains', "
    "'word_sums' or 'countdown' (embedded), a .jsonl, .json, .parquet or .csv file, a folder of such files, "
    "or a Hugging Face data set id such as 'bespokelabs/Bespoke-Stratos-17k' or, with a configuration, "
    "'openai/gsm8k:main'"
)


def read_rows(
    source: str,
    split: str = "train",
    num_embedded_rows: int = 1000,
    seed: int = 0,
    max_rows: int | None = None,
) -> list[NumberedRow]:
    """Read the rows of a source, and complete Countdown problems with question and solution.

    Args:
        source: An embedded source, a file, a folder, a hub id or `ID:CONFIGURATION`.
        split: Split of a hub data set, a saved data set, an embedded source, or a folder whose files are
            named after splits.
        num_embedded_rows: Size of an embedded source.
        seed: Seed of an embedded source.
        max_rows: Most rows to read, from the start; None for all.

    Returns:
        Row numbers from 1 (line numbers in a JSONL file), each with the row's columns, or with the reason why
        it has none.

    Raises:
        InputError: If the source does not exist, cannot be read as a whole, or is empty.
    """
    numbered = islice(_numbered_rows(source, split, num_embedded_rows, seed), max_rows)
    rows = [(number, complete_countdown(columns)) for number, columns in numbered]
    if not rows:
        raise InputError(
            f"The source must have at least one row, but '{source}' has none. Use {SOURCE_CHOICES}."
        )
    return rows


def _numbered_rows(source: str, split: str, num_embedded_rows: int, seed: int) -> Iterator[NumberedRow]:
    path = Path(source).expanduser()
    if source in EMBEDDED:
        yield from enumerate(EMBEDDED[source](num_embedded_rows, seed, split), start=1)
    elif path.is_dir():
        yield from _read_folder(path, split)
    elif path.is_file():
        yield from _read_file(path)
    elif path.suffix in READERS or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]+)?", source):
        raise InputError(f"The file or folder '{source}' must exist, but does not. Use {SOURCE_CHOICES}.")
    else:
        yield from _read_hub(source, split)


def _read_file(path: Path) -> Iterator[NumberedRow]:
    if path.suffix not in READERS:
        raise InputError(
            f"The data file must be {', '.join(READERS)}, but is {path}. Convert it, or use {SOURCE_CHOICES}."
        )
    announce_reading(path)
    try:
        yield from READERS[path.suffix](path)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"The data file {path} must be readable, but is not ({_one_line(error)}). Check its permissions, "
            "its encoding (UTF-8), and that it is complete."
        ) from error


def _read_jsonl(path: Path) -> Iterator[NumberedRow]:
    """Read one row per line. A broken line is a bad row; blank lines count, but are not rows."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, _columns(json.loads(line))
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
        yield number, _columns(value)


def _read_parquet(path: Path) -> Iterator[NumberedRow]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise InputError(
            f"The file {path} must be a whole Parquet file, but is not ({_one_line(error)}). Write it "
            f"again, or use {SOURCE_CHOICES}."
        ) from error
    yield from enumerate(rows, start=1)


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


def _columns(value: Any) -> dict[str, Any] | BadRowError:
    if isinstance(value, dict):
        return value
    return BadRowError(BadRowReason.WRONG_TYPE, f"a row must be an object, but is {type(value).__name__}")


# A file whose name starts with one of these belongs to that split: rows of another split must not leak in.
SPLIT_NAMES = {"train", "test", "validation", "val", "dev"}


def _read_folder(folder: Path, split: str) -> Iterator[NumberedRow]:
    """Read a saved data set, or all files of one kind: only the split's files if they are named after it."""
    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        yield from _read_saved_dataset(folder, split)
        return
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in READERS and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    kinds = sorted({path.suffix for path in files})
    if len(kinds) != 1:
        found = f"holds {', '.join(kinds)}" if kinds else "holds none"
        raise InputError(
            f"A data folder must hold files of one kind ({', '.join(READERS)}) or a saved data set, but "
            f"{folder} {found}. Name one file, or use {SOURCE_CHOICES}."
        )
    splits = {path: re.split(r"[-_.]", path.name)[0] for path in files}
    of_split = [path for path in files if splits[path] == split]
    if not of_split and (others := sorted(set(splits.values()) & SPLIT_NAMES)):
        raise InputError(
            f"The data folder {folder} must have files of the split '{split}', but has files of "
            f"{', '.join(others)}. Set data.split (of an evaluation set: its split), or name one file."
        )
    offset = 0
    for path in of_split or files:
        number = 0
        for number, columns in _read_file(path):
            yield offset + number, columns
        offset += number


def _read_saved_dataset(folder: Path, split: str) -> Iterator[NumberedRow]:
    import datasets

    try:
        dataset = datasets.load_from_disk(str(folder))
    except IndexError:
        # The library fails on a set that was saved without rows.
        return
    except (OSError, ValueError) as error:
        raise InputError(
            f"The saved data set {folder} must be loadable, but is not ({_one_line(error)}). Save it again, "
            f"or use {SOURCE_CHOICES}."
        ) from error
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise InputError(
                f"The saved data set {folder} must have the split '{split}', but has {', '.join(dataset)}. "
                "Set data.split, or the split of an evaluation set."
            )
        dataset = dataset[split]
    yield from enumerate(dataset, start=1)


def _read_hub(source: str, split: str) -> Iterator[NumberedRow]:
    import datasets

    hub_log = logging.getLogger("huggingface_hub")
    level = hub_log.level
    # Five retry warnings say less than the one line below.
    hub_log.setLevel(logging.ERROR)
    name, _, configuration = source.partition(":")
    announce(f"loading the data set {source} from the Hugging Face hub or its cache")
    try:
        dataset = datasets.load_dataset(name, configuration or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError(
            f"The data set '{source}', split '{split}', could not be loaded ({_one_line(error)}). "
            f"Use {SOURCE_CHOICES}."
        ) from error
    finally:
        hub_log.setLevel(level)
    yield from enumerate(dataset, start=1)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
