"""Read rows from memory, an embedded set, a file, a folder or the hub, one at a time.

    data.source ─ parse_sources ─▶ names, rows in memory ─ SourceReader.open ─▶ one of five kinds:

    MemoryRows, EmbeddedRows, FileRows, SavedRows, HubRows

A kind knows how its rows are read, and has a fingerprint, which changes when they do.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import pickle
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rlt_lightning.console import announce, announce_reading, without_hub_retries
from rlt_lightning.datamodules.bad_rows import TO_UTF8, NumberedRow
from rlt_lightning.datamodules.rows import has_texts
from rlt_lightning.tasks import EMBEDDED
from rlt_lightning.tasks.countdown import complete_columns
from rlt_lightning.types import BadRowError, BadRowReason, InputError, as_list

SOURCE_CHOICES = (
    "'arithmetic' (the default), 'arithmetic:KIND' such as 'arithmetic:addition', 'chains', 'new_chains', "
    "'word_sums' or 'countdown' (embedded), a .jsonl, .json, .parquet or .csv file, a folder of such files, "
    "or a Hugging Face data set id such as 'bespokelabs/Bespoke-Stratos-17k' or, with a configuration, "
    "'openai/gsm8k:main'"
)

WEIGHTED = {"source", "weight"}  # the fields of a source with a weight


@dataclass(frozen=True, eq=False)
class MemoryRows:
    """Rows that a script brings: they are read as the lines of a JSONL file would be.

    Args:
        rows: A list of dictionaries, or a `datasets.Dataset`.
        first: Number of the first row.
    """

    rows: Any
    first: int = 1

    def __str__(self) -> str:
        return f"{len(self.rows)} rows in memory"

    def read_rows(self) -> Iterator[NumberedRow]:
        """Yield the rows with their numbers."""
        for number, row in enumerate(self.rows, start=self.first):
            yield number, read_columns(dict(row) if isinstance(row, Mapping) else row)

    def fingerprint(self) -> list[Any]:
        """Return a hash of the rows."""
        found = hashlib.blake2b(b"" if self.first == 1 else str(self.first).encode())
        for row in self.rows:
            # What JSON does not know counts as it is pickled.
            found.update(json.dumps(row, default=lambda value: pickle.dumps(value).hex()).encode() + b"\n")
        return [found.hexdigest()]


Source = str | MemoryRows


@dataclass(frozen=True)
class WeightedSource:
    """One of several sources that training mixes.

    Args:
        source: The source.
        weight: Its share of the training rows, as a part of the sum of all weights.
    """

    source: Any
    weight: float

    def __post_init__(self) -> None:
        if not (isinstance(self.weight, int | float) and 0 < self.weight < float("inf")):
            raise InputError(
                f"The weight of a source must be a number above 0, but '{self.source}' has {self.weight}. "
                "Correct it, or drop the source."
            )


def parse_sources(setting: Any) -> list[Source]:
    """Return the sources that `data.source` or `data.val_source` names; a list of dictionaries is one source.

    Raises:
        InputError: If one is neither a name nor rows.
    """
    found: list[Source] = []
    for value, _ in _pair_weights(setting):
        if isinstance(value, (str, MemoryRows)):
            found.append(value)
        elif isinstance(value, Path):
            found.append(str(value))
        elif _is_table(value):
            found.append(MemoryRows(value))
        else:
            raise InputError(
                "A source must be a name, a path, a list of dictionaries or a datasets.Dataset, or a list of "
                f"these, but is of type {type(value).__name__}. Convert it; of a DatasetDict choose a split."
            )
    return found


def parse_weights(setting: Any) -> list[float]:
    """Return the weight of each source of a setting; an empty list if none has one.

    Raises:
        InputError: If only some have one.
    """
    weights = [weight for _, weight in _pair_weights(setting)]
    known = [weight for weight in weights if weight is not None]
    if known and len(known) < len(weights):
        without = parse_sources(setting)[weights.index(None)]
        raise InputError(
            f"Either all sources of data.source have a weight or none, but '{without}' has none. Write it as "
            f"{{source: {without}, weight: 1}}."
        )
    return known


def name_sources(setting: Any) -> str:
    """Return the names of a setting's sources, for a message."""
    return ", ".join(map(str, parse_sources(setting)))


def _pair_weights(setting: Any) -> list[tuple[Any, float | None]]:
    """Return the sources of a setting, as they are given, each with its weight, or None."""
    found: list[tuple[Any, float | None]] = []
    for value in [setting] if _is_table(setting) else as_list(setting):
        if isinstance(value, Mapping) and value.keys() == WEIGHTED:
            value = WeightedSource(**value)
        has_weight = isinstance(value, WeightedSource)
        found.append((value.source, value.weight) if has_weight else (value, None))
    return found


def _is_table(value: Any) -> bool:
    """Return whether a value is rows: a list with dictionaries that are no sources with weights."""
    # A Dataset can only come from a program that has imported the library.
    datasets = sys.modules.get("datasets")
    if isinstance(value, (list, tuple)):
        return any(isinstance(row, Mapping) and row.keys() != WEIGHTED for row in value)
    return datasets is not None and isinstance(value, datasets.Dataset)


@dataclass(frozen=True)
class SourceReader:
    """What is read of every source of a run.

    A source is rows in memory, an embedded set, a file, a folder, a hub id, or either of the last two with
    `:CONFIGURATION`.

    Args:
        split: Split of a hub data set, a saved data set, an embedded source, or a folder whose files are
            named after splits.
        num_embedded_rows: Size of an embedded source.
        seed: Seed of an embedded source.
        max_rows: Most rows to read, from the start; None for all.
        streaming: Whether data sets in the hub's form are read row by row, not loaded as a whole first.
    """

    split: str = "train"
    num_embedded_rows: int = 1000
    seed: int = 0
    max_rows: int | None = None
    streaming: bool = False

    def read(self, source: Source) -> Iterator[NumberedRow]:
        """Yield the rows of a source; a problem of ours without texts gets question and solution.

        Returns:
            Row numbers from 1 (line numbers in a JSONL file), each with the row's columns, or with the
            reason why it has none.

        Raises:
            InputError: If the source does not exist, cannot be read as a whole, or is empty.
        """
        number = 0
        for number, columns in islice(self.open(source).read_rows(), self.max_rows):
            yield number, complete_row(columns)
        if not number:
            raise InputError(
                f"The source must have at least one row, but '{source}' has none. Use {SOURCE_CHOICES}."
            )

    def fingerprint(self, source: Source) -> list[Any]:
        """Return plain values that change when the rows of a source do.

        Raises:
            InputError: If the source does not exist.
        """
        return [self.split, self.max_rows, *self.open(source).fingerprint()]

    def open(self, source: Source) -> MemoryRows | EmbeddedRows | FileRows | SavedRows | HubRows:
        """Return what reads a source; nothing is read yet.

        Raises:
            InputError: If the source does not exist.
        """
        if isinstance(source, MemoryRows):
            return source
        if source in EMBEDDED:
            return EmbeddedRows(source, self.num_embedded_rows, self.seed, self.split)
        if (name := parse_hub_name(source)) is not None:
            return HubRows(source, *name, self.split, self.streaming)
        folder = Path(source).expanduser()
        if folder.is_dir() and is_saved(folder):
            return SavedRows(folder, self.split)
        return FileRows(list_files(source, self.split))


def complete_row(columns: dict[str, Any] | BadRowError) -> dict[str, Any] | BadRowError:
    """Write out the problem of a row that has no texts, or return why it has none; keep other rows."""
    if isinstance(columns, BadRowError) or has_texts(columns):
        return columns
    try:
        return complete_columns(columns)
    except BadRowError as error:
        return error


def read_rows(
    source: str | MemoryRows,
    split: str = "train",
    num_embedded_rows: int = 1000,
    seed: int = 0,
    max_rows: int | None = None,
) -> list[NumberedRow]:
    """Return the rows of a source as a list; see `SourceReader`."""
    return list(SourceReader(split, num_embedded_rows, seed, max_rows).read(source))


def parse_hub_name(source: str) -> tuple[str, str] | None:
    """Return hub id, or folder of a copy, and configuration of a data set in the hub's form; else None."""
    name, _, configuration = source.partition(":")
    path = Path(source).expanduser()
    if path.is_dir() or path.is_file() or source in EMBEDDED:
        return (str(path), "") if path.is_dir() and not is_saved(path) and is_hub_folder(path) else None
    if name and Path(name).expanduser().is_dir():
        return str(Path(name).expanduser()), configuration
    if path.suffix in READERS or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]+)?", source):
        raise InputError(f"The file or folder '{source}' must exist, but does not. Use {SOURCE_CHOICES}.")
    return name, configuration


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

    def fingerprint(self) -> list[Any]:
        """Return the rows themselves, since the code that makes them may change."""
        return list(self.read_rows())


def list_visible(folder: Path) -> list[Path]:
    """Return the files of a folder and of its sub-folders, in order; hidden ones left out."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]


def hash_files(paths: Iterable[Path]) -> list[tuple[str, str]]:
    """Return the names of files, each with a hash of its contents."""
    found: list[tuple[str, str]] = []
    for path in paths:
        with name_unreadable(path), path.open("rb") as file:
            found.append((path.name, hashlib.file_digest(file, "blake2b").hexdigest()))
    return found


# A file whose name starts with one of these belongs to that split: rows of another split must not leak in.
SPLIT_NAMES = {"train", "test", "validation", "val", "dev"}


def list_files(source: str, split: str) -> list[Path]:
    """Return a file, or the files of a folder: all of one kind, only the split's if they are named after it.

    Raises:
        InputError: If the folder has no such files.
    """
    folder = Path(source).expanduser()
    if folder.is_file():
        return [folder]
    files = [path for path in list_visible(folder) if path.suffix in READERS]
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
    return of_split or files


# Files


@dataclass(frozen=True)
class FileRows:
    """The rows of one file or several, which are numbered on."""

    files: list[Path]

    def read_rows(self) -> Iterator[NumberedRow]:
        """Yield the rows; see `read_file`."""
        offset = 0
        for path in self.files:
            number = 0
            for number, columns in read_file(path):
                yield offset + number, columns
            offset += number

    def fingerprint(self) -> list[Any]:
        """Return the files' names and hashes."""
        return hash_files(self.files)


PARQUET_ROWS = 1000  # that are in memory at a time
BEGIN = re.compile(r"\S")  # of a value in JSON


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
    with name_unreadable(path):
        require_content(path)
        yield from READERS[path.suffix](path)


@contextlib.contextmanager
def name_unreadable(path: Path) -> Iterator[None]:
    """Turn a failure to read a file into one line."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise InputError(
            f"The data file {path} must be readable as UTF-8, but is not ({shorten_error(error)}). Find out "
            f"its encoding, and {TO_UTF8.format(source=path)}."
        ) from error
    except OSError as error:
        raise InputError(
            f"The data file {path} must be readable, but is not ({shorten_error(error)}). Check its "
            "permissions, and that it is complete."
        ) from error


POINTER = b"version https://git-lfs"  # begins the file that git keeps in place of a large one


def require_content(path: Path) -> None:
    """Check that a file is not what git keeps in place of it.

    Raises:
        InputError: If it is.
    """
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise InputError(
                f"The file {path} must hold rows, but is a pointer that Git LFS keeps in place of it. Run "
                f"`git lfs pull` in {path.parent}, or copy the data set with `hf download`."
            )


def _read_jsonl(path: Path) -> Iterator[NumberedRow]:
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
        return read_columns(json.loads(line.decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        return BadRowError(BadRowReason.WRONG_ENCODING, f"the line is not in UTF-8 ({shorten_error(error)})")
    except (ValueError, RecursionError) as error:
        return BadRowError(BadRowReason.BROKEN_JSON, str(error))


def _read_values(content: bytes) -> list[NumberedRow] | None:
    """Return the rows of an array, by their place, or of objects that follow each other, by their first line.

    Returns:
        None if the content is neither.
    """
    try:
        text = content.decode("utf-8-sig")
        values, lines, line, end = [], [], 1, 0
        while begin := BEGIN.search(text, end):
            line += text.count("\n", end, begin.start())
            value, stop = json.JSONDecoder().raw_decode(text, begin.start())
            values.append(value)
            lines.append(line)
            line, end = line + text.count("\n", begin.start(), stop), stop
    except (ValueError, RecursionError):
        return None
    if len(values) == 1 and isinstance(values[0], list):
        return [(place, read_columns(value)) for place, value in enumerate(values[0], start=1)]
    is_rows = all(isinstance(value, dict) for value in values)
    return [(line, value) for line, value in zip(lines, values, strict=True)] if is_rows else None


def _read_json(path: Path) -> Iterator[NumberedRow]:
    try:
        content = json.loads(path.read_bytes())
    except UnicodeDecodeError:
        raise
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
        yield number, read_columns(value)


def _read_parquet(path: Path) -> Iterator[NumberedRow]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            require_different_names(path, file.schema_arrow.names)
            batches = file.iter_batches(PARQUET_ROWS)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
    except pyarrow.ArrowException as error:
        raise InputError(
            f"The file {path} must be a whole Parquet file, but is not ({shorten_error(error)}). Write it "
            f"again, or use {SOURCE_CHOICES}."
        ) from error


def _read_csv(path: Path) -> Iterator[NumberedRow]:
    """Read a table whose first line names the columns; every cell is text, even if it looks like a number."""
    # A reasoning trace is longer than the default allows.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            reader = csv.DictReader(file, strict=True)
            require_different_names(path, reader.fieldnames or ())
            for number, row in enumerate(reader, start=1):
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


def require_different_names(path: Path, names: Sequence[str]) -> None:
    """Check that the columns of a table have different names; columns without a name may be several.

    Raises:
        InputError: If two have the same.
    """
    if repeated := sorted(name for name, number in Counter(names).items() if name and number > 1):
        raise InputError(
            f"The columns of {path} must have different names, but several are called "
            f"{', '.join(repeated)}. Rename or remove all but one."
        )


READERS: dict[str, Callable[[Path], Iterator[NumberedRow]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}


def read_columns(value: Any) -> dict[str, Any] | BadRowError:
    """Return a row's columns, or why it has none."""
    if isinstance(value, dict):
        return value
    return BadRowError(BadRowReason.WRONG_TYPE, f"a row must be an object, but is {type(value).__name__}")


# Data sets in the hub's form: from the hub, copies of them in folders, and folders of `save_to_disk`

README, INFOS = "README.md", "dataset_infos.json"


@dataclass(frozen=True)
class HubRows:
    """A data set of the hub, or a copy of one in a folder.

    Args:
        source: What the user calls it.
        name: Hub id, or path of the copy.
        configuration: Which of its parts; '' if it has only one.
        split: Which of its splits.
        streaming: Whether rows are read as they are asked for, rather than all before the first.
    """

    source: str
    name: str
    configuration: str
    split: str
    streaming: bool

    def read_rows(self) -> Iterator[NumberedRow]:
        """Yield the rows, numbered from 1."""
        rows = load_hub(self.name, self.configuration, self.split, self.streaming)
        with name_unloadable(self.source, self.split):
            yield from enumerate(rows, start=1)

    def fingerprint(self) -> list[Any]:
        """Return what it is read from: of a copy all files, else the hub's files with the commit."""
        if Path(self.name).is_dir():
            return [self.configuration, *hash_files(list_visible(Path(self.name)))]
        if self.streaming:
            return [find_version(self.name, self.configuration, self.split)]
        dataset = load_hub(self.name, self.configuration, self.split, streaming=False)
        files = [Path(file["filename"]) for file in dataset.cache_files]
        return [self.configuration, dataset._fingerprint, *hash_files(files)]


@dataclass(frozen=True)
class SavedRows:
    """A folder that `save_to_disk` has written."""

    folder: Path
    split: str

    def read_rows(self) -> Iterator[NumberedRow]:
        """Yield the rows, numbered from 1."""
        yield from enumerate(load_saved(self.folder, self.split), start=1)

    def fingerprint(self) -> list[Any]:
        """Return the files' names and hashes."""
        return hash_files(list_visible(self.folder))


def is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` has written a folder."""
    return (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file()


def is_hub_folder(folder: Path) -> bool:
    """Return whether a folder is a data set as the hub keeps it: its card says which files are which."""
    if (folder / INFOS).is_file():
        return True
    readme = folder / README
    if not readme.is_file():
        return False
    text = readme.read_text(encoding="utf-8", errors="replace")
    header = text.partition("\n---")[0] if text.startswith("---\n") else ""
    return any(line.startswith(("configs:", "dataset_info:")) for line in header.splitlines())


def load_hub(name: str, configuration: str, split: str, streaming: bool) -> Any:
    """Load a data set from the hub, or from a copy in a folder.

    Args:
        name: Hub id, or path of the copy.
        configuration: Which of its parts; '' if it has only one.
        split: Which of its splits.
        streaming: Read rows as they are asked for, rather than all of them before the first.

    Raises:
        InputError: If it cannot be loaded, with the library's reason.
    """
    import datasets

    from_where = "" if Path(name).is_dir() else " from the Hugging Face hub or its cache"
    announce(f"loading the data set {name}{configuration and f':{configuration}'}{from_where}")
    with name_unloadable(name + (configuration and f":{configuration}"), split):
        require_no_pointers(Path(name))
        return datasets.load_dataset(name, configuration or None, split=split, streaming=streaming)


def find_version(name: str, configuration: str, split: str) -> str:
    """Return what a streamed data set of the hub is read from: the addresses of its files, with the commit.

    Raises:
        InputError: If it cannot be found.
    """
    import datasets

    with name_unloadable(name, split):
        builder = datasets.load_dataset_builder(name, configuration or None)
        return f"{builder.hash} {builder.config.data_files}"


@contextlib.contextmanager
def name_unloadable(name: str, split: str) -> Iterator[None]:
    """Turn a failure to load or read a data set into one line."""
    import datasets

    try:
        with without_hub_retries():
            yield
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"The data set '{name}', split '{split}', could not be loaded ({shorten_error(error)}). Check "
            f"data.split and the network, or use {SOURCE_CHOICES}."
        ) from error


def require_no_pointers(folder: Path) -> None:
    """Check that a folder that git has copied holds the files themselves.

    Raises:
        InputError: If it holds what git keeps in place of a large file.
    """
    for path in list_visible(folder):
        if path.suffix in READERS:
            require_content(path)


def load_saved(folder: Path, split: str) -> Any:
    """Load what `save_to_disk` has written; an empty list for a set that was saved without rows.

    Raises:
        InputError: If it cannot be loaded, or lacks the split.
    """
    import datasets

    try:
        dataset = datasets.load_from_disk(str(folder))
    except IndexError:
        # The library fails on a set that was saved without rows.
        return []
    except (OSError, ValueError) as error:
        raise InputError(
            f"The saved data set {folder} must be loadable, but is not ({shorten_error(error)}). Save it "
            "again, or name another source."
        ) from error
    if not isinstance(dataset, datasets.DatasetDict):
        return dataset
    if split not in dataset:
        raise InputError(
            f"The saved data set {folder} must have the split '{split}', but has {', '.join(dataset)}. "
            "Set data.split, or the split of an evaluation set."
        )
    return dataset[split]


def shorten_error(error: Exception) -> str:
    """Return the beginning of an error's text without its line ends."""
    return " ".join(str(error).split())[:200] or type(error).__name__
