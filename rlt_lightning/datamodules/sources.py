"""Read rows from memory, an embedded set, text files, or what `datasets` loads, one at a time.

data.source ─ parse_sources ─▶ names, rows in memory ─ SourceReader.open ─▶ one of four kinds:

MemoryRows      a list of dictionaries, or a data set of `datasets`
EmbeddedRows    problems made from a seed
TextRows        JSONL, JSON and CSV files
DatasetRows     what `datasets` loads: the hub, copies of it, Parquet and Arrow files
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rlt_lightning.datamodules.bad_rows import NumberedRow
from rlt_lightning.tasks import EMBEDDED
from rlt_lightning.types import BadRowError, BadRowReason, InputError, as_list

SOURCE_CHOICES = (
    "'chains' (the default), 'new_chains', 'word_sums' or 'countdown' (embedded), a .jsonl, .json, .csv, "
    ".parquet or .arrow file, a folder of such files, or a Hugging Face data set id such as "
    "'openai/gsm8k:main'"
)


@dataclass(frozen=True, eq=False)
class MemoryRows:
    """Rows that a script passes: they are read like the lines of a JSONL file.

    Args:
        rows: A list of dictionaries, or a data set of `datasets` without splits, streamed or not.
    """

    rows: Any

    def __str__(self) -> str:
        return f"{len(self.rows)} rows in memory" if hasattr(self.rows, "__len__") else "a stream of rows"

    def read_rows(self) -> Iterator[NumberedRow]:
        """Yield the rows with their numbers."""
        for number, row in enumerate(self.rows, start=1):
            yield number, read_columns(dict(row) if isinstance(row, Mapping) else row)


Source = str | MemoryRows


def parse_sources(setting: Any) -> list[Source]:
    """Return the sources that `data.source` or `data.val_source` names; a list of dictionaries is one source.

    Raises:
        InputError: If one is neither a name nor rows.
    """
    sources: list[Source] = []
    for value in [setting] if _is_table(setting) else as_list(setting):
        if isinstance(value, str | Path):
            sources.append(str(value))
        elif _is_table(value):
            sources.append(MemoryRows(value))
        else:
            raise InputError(
                "A source must be a name, a path, a list of dictionaries or a data set of `datasets`, or a "
                f"list of these, but is of type {type(value).__name__}. Convert it."
            )
    return sources


def _is_table(value: Any) -> bool:
    """Return whether a value is rows: a data set, or a list with a dictionary."""
    if isinstance(value, (list, tuple)):
        return any(isinstance(row, Mapping) for row in value)
    return type(value).__module__.partition(".")[0] == "datasets"


@dataclass(frozen=True)
class SourceReader:
    """How every source of a run is read.

    A source is rows in memory, an embedded set, a file, a folder, a hub id, or either of the last two with
    `:CONFIGURATION`.

    Args:
        split: Split of a hub data set, an embedded source, or a folder whose files are named after splits.
        num_embedded_rows: Size of an embedded source.
        seed: Seed of an embedded source.
        max_rows: Most rows to read, from the start; None for all.

    Raises:
        InputError: If the split is a part of one.
    """

    split: str = "train"
    num_embedded_rows: int = 1000
    seed: int = 0
    max_rows: int | None = None

    def __post_init__(self) -> None:
        if re.search(r"[\[+]", self.split):
            raise InputError(
                f"data.split must be a whole split, but is {self.split}. Name it, and set data.max_rows."
            )

    def read(self, source: Source) -> Iterator[NumberedRow]:
        """Yield the rows of a source.

        Returns:
            Row numbers from 1 (line numbers in a JSONL file), each with the row's columns, or with the
            reason why it has none.

        Raises:
            InputError: If the source does not exist, cannot be read as a whole, or is empty.
        """
        number = 0
        for number, columns in islice(self.open(source).read_rows(), self.max_rows):
            yield number, columns
        if not number:
            raise InputError(
                f"The source must have at least one row, but '{source}' has none. Use {SOURCE_CHOICES}."
            )

    def fingerprint(self, source: Source) -> list[Any] | None:
        """Return plain values that change when the rows of files or of the hub do; None of other rows.

        Raises:
            InputError: If the source does not exist.
        """
        rows = self.open(source)
        if not isinstance(rows, TextRows | DatasetRows):
            return None
        return [self.split, self.max_rows, *rows.fingerprint()]

    def open(self, source: Source) -> MemoryRows | EmbeddedRows | TextRows | DatasetRows:
        """Return the reader of a source; a file is not read yet.

        Raises:
            InputError: If the source does not exist, or lacks the split.
        """
        if isinstance(source, MemoryRows):
            return source
        if source in EMBEDDED:
            return EmbeddedRows(source, self.num_embedded_rows, self.seed, self.split)
        path, (name, _, configuration) = Path(source).expanduser(), source.partition(":")
        folder = Path(name).expanduser()
        if path.is_dir() and is_hub_folder(path):
            return DatasetRows(source, str(path), "", self.split)
        if path.exists():
            files = list_files(path, self.split)
            kind = TABLES.get(files[0].suffix)
            return DatasetRows(source, kind, "", self.split, files) if kind else TextRows(files)
        if name and folder.is_dir():
            return DatasetRows(source, str(folder), configuration, self.split)
        is_hub_id = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]+)?", source)
        starts_here = folder.parent != Path() and folder.parent.is_dir()
        if path.suffix in SUFFIXES or starts_here or not is_hub_id:
            raise InputError(f"The file or folder '{source}' must exist, but does not. Use {SOURCE_CHOICES}.")
        return DatasetRows(source, name, configuration, self.split)


def read_rows(
    source: Source,
    split: str = "train",
    num_embedded_rows: int = 1000,
    seed: int = 0,
    max_rows: int | None = None,
) -> list[NumberedRow]:
    """Return the rows of a source as a list; see `SourceReader`."""
    return list(SourceReader(split, num_embedded_rows, seed, max_rows).read(source))


@dataclass(frozen=True)
class EmbeddedRows:
    """The problems that the project makes from a seed.

    Args:
        name: One of `EMBEDDED`.
        num_rows: How many there are.
        seed: The seed.
        split: Which of the splits.
    """

    name: str
    num_rows: int
    seed: int
    split: str

    def read_rows(self) -> Iterator[NumberedRow]:
        """Yield the rows, numbered from 1."""
        yield from enumerate(EMBEDDED[self.name](self.num_rows, self.seed, self.split), start=1)


def list_visible(folder: Path) -> list[Path]:
    """Return the files of a folder and of its sub-folders, in order; hidden ones left out."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]


def hash_files(paths: Iterable[Path]) -> list[tuple[str, str]]:
    """Return the names of files, each with a hash of its contents."""
    hashes: list[tuple[str, str]] = []
    for path in paths:
        with name_unreadable(path), path.open("rb") as file:
            hashes.append((path.name, hashlib.file_digest(file, "blake2b").hexdigest()))
    return hashes


# A file whose name starts with one of these belongs to that split: rows of another split must not leak in.
SPLIT_NAMES = {"train", "test", "validation", "val", "dev"}


def list_files(folder: Path, split: str) -> list[Path]:
    """Return a file, or the files of a folder: all of one kind, only the split's if they are named after it.

    Raises:
        InputError: If the folder has no such files.
    """
    files = (
        [folder] if folder.is_file() else [path for path in list_visible(folder) if path.suffix in SUFFIXES]
    )
    kinds = sorted({path.suffix for path in files})
    if len(kinds) != 1 or kinds[0] not in SUFFIXES:
        raise InputError(
            f"A data file, or the files of a folder, must be of one kind ({', '.join(SUFFIXES)}), but "
            f"{folder} has {', '.join(kinds) or 'none'}. Name one file, or use {SOURCE_CHOICES}."
        )
    splits = {path: re.split(r"[-_.]", path.name)[0] for path in files}
    of_split = [path for path in files if splits[path] == split]
    others = sorted(set(splits.values()) & SPLIT_NAMES)
    if others and not of_split and files != [folder]:
        raise InputError(
            f"The data folder {folder} must have files of the split '{split}', but has files of "
            f"{', '.join(others)}. Set data.split (of an evaluation set: its split), or name one file."
        )
    return of_split or files


# Text files: `datasets` refuses a whole file for one bad line, makes dates of texts and one type of a column


@dataclass(frozen=True)
class TextRows:
    """The rows of one file or several, numbered consecutively."""

    files: list[Path]

    def read_rows(self) -> Iterator[NumberedRow]:
        """Yield the rows, in a JSONL file numbered by its lines.

        Raises:
            InputError: If a file cannot be read as a whole.
        """
        offset = 0
        for path in self.files:
            number = 0
            with name_unreadable(path):
                for number, columns in READERS[path.suffix](path):
                    yield offset + number, columns
            offset += number

    def fingerprint(self) -> list[Any]:
        """Return the files' names and hashes."""
        return hash_files(self.files)


def parse_float(text: str) -> float | str:
    """Return a number, or its text where a float has none: Python's reader makes infinity of 1e400."""
    value = float(text)
    return text if math.isinf(value) else value


JSON = json.JSONDecoder(parse_float=parse_float)
BEGIN = re.compile(r"\S")  # of a value in JSON


def _read_json(path: Path) -> Iterator[NumberedRow]:
    """Read one row per line. A broken line is a bad row; blank lines count, but are not rows.

    A file whose first line is no object may be an array, or objects of several lines: see `_read_values`.
    """
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"{}")
        file.seek(0)
        if not isinstance(_read_line(first), dict) and (rows := _read_values(file.read())):
            yield from rows
            return
        file.seek(0)
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _read_line(line)


def _read_line(line: bytes) -> dict[str, Any] | BadRowError:
    """Return the row of a line, or why it has none."""
    if b"\0" in line:
        return BadRowError(BadRowReason.WRONG_ENCODING, "the line holds zero bytes, as in UTF-16")
    try:
        return read_columns(JSON.decode(line.decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        return BadRowError(BadRowReason.WRONG_ENCODING, f"the line is not in UTF-8 ({shorten_error(error)})")
    except (ValueError, RecursionError) as error:
        return BadRowError(BadRowReason.BROKEN_JSON, str(error))


def _read_values(content: bytes) -> list[NumberedRow] | None:
    """Return the rows of an array, by number, or of objects that follow each other, by their first line.

    Returns:
        None if the content is neither.
    """
    try:
        text = content.decode("utf-8-sig")
        values, lines, line, end = [], [], 1, 0
        while begin := BEGIN.search(text, end):
            line += text.count("\n", end, begin.start())
            value, stop = JSON.raw_decode(text, begin.start())
            values.append(value)
            lines.append(line)
            line, end = line + text.count("\n", begin.start(), stop), stop
    except (ValueError, RecursionError):
        return None
    if len(values) == 1 and isinstance(values[0], list):
        return [(number, read_columns(value)) for number, value in enumerate(values[0], start=1)]
    is_rows = all(isinstance(value, dict) for value in values)
    return [(line, value) for line, value in zip(lines, values, strict=True)] if is_rows else None


def _read_csv(path: Path) -> Iterator[NumberedRow]:
    """Read a table whose first line names the columns; every cell is text, even if it looks like a number."""
    # A reasoning trace is longer than the default allows.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        names = Counter(filter(None, reader.fieldnames or ()))
        if repeated := sorted(name for name, number in names.items() if number > 1):
            raise InputError(
                f"The columns of {path} must have different names, but several are called "
                f"{', '.join(repeated)}. Rename or remove all but one."
            )
        for number, row in enumerate(reader, start=1):
            if None in row or None in row.values():
                detail = "the row has more or fewer cells than the header"
                yield number, BadRowError(BadRowReason.WRONG_TYPE, detail)
            else:
                yield number, dict(row)


READERS: dict[str, Callable[[Path], Iterator[NumberedRow]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
}
TABLES = {".parquet": "parquet", ".arrow": "arrow"}  # what `datasets` calls them
SUFFIXES = [*READERS, *TABLES]


def read_columns(value: Any) -> dict[str, Any] | BadRowError:
    """Return a row's columns, or why it has none."""
    if isinstance(value, dict):
        return value
    return BadRowError(BadRowReason.WRONG_TYPE, f"a row must be an object, but is {type(value).__name__}")


# What `datasets` loads


@contextlib.contextmanager
def name_unreadable(name: str | Path) -> Iterator[None]:
    """Turn a failure to load or read a source, or one of its files, into one line."""
    import datasets
    import pyarrow  # type: ignore[import-untyped]

    failures = (OSError, ValueError, KeyError, TypeError, csv.Error)
    try:
        yield
    except InputError:
        raise
    except (*failures, pyarrow.ArrowException, datasets.exceptions.DatasetsError) as error:
        raise InputError(
            f"The source '{name}' could not be loaded ({shorten_error(error)}). Check data.split, its files, "
            f"which must be in UTF-8, and the network, or use {SOURCE_CHOICES}."
        ) from error


@dataclass(frozen=True)
class DatasetRows:
    """A data set of the hub or a copy of one in a folder, Parquet or Arrow files.

    Local files are streamed: so no copy of them enters the library's cache, which tells a changed file by its
    time only.

    Args:
        source: What the user calls it.
        name: Hub id, folder, or what `datasets` calls the kind of the files.
        configuration: Which part of the data set; '' if it has only one.
        split: Which of its splits.
        files: The Parquet or Arrow files.
    """

    source: str
    name: str
    configuration: str
    split: str
    files: Sequence[Path] = ()

    @property
    def local_files(self) -> Sequence[Path]:
        """Return all files from which rows come; none for the hub."""
        return self.files or list_visible(Path(self.name))

    def load(self) -> Any:
        """Return a Dataset of the hub, or an IterableDataset of files."""
        import datasets

        return datasets.load_dataset(
            self.name,
            self.configuration or None,
            data_files={self.split: [str(path) for path in self.files]} if self.files else None,
            split=self.split,
            streaming=bool(self.local_files),
        )

    def read_rows(self) -> Iterator[NumberedRow]:
        """Yield the rows, numbered from 1.

        Raises:
            InputError: If it cannot be loaded, with the library's reason.
        """
        with name_unreadable(self.source):
            yield from enumerate(self.load(), start=1)

    def fingerprint(self) -> list[Any]:
        """Return hashes of the files, or of the hub what `datasets` knows them by."""
        if self.local_files:
            return [self.configuration, *hash_files(self.local_files)]
        with name_unreadable(self.source):
            return [self.load()._fingerprint]


def is_hub_folder(folder: Path) -> bool:
    """Return whether a folder is a data set as the hub keeps it: its card says which files are which."""
    if (folder / "dataset_infos.json").is_file():
        return True
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    header = text.partition("\n---")[0] if text.startswith("---\n") else ""
    return any(line.startswith(("configs:", "dataset_info:")) for line in header.splitlines())


def shorten_error(error: Exception) -> str:
    """Return the beginning of an error's text without its line ends."""
    return " ".join(str(error).split())[:200] or type(error).__name__
