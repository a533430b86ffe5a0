"""Read rows from memory, an embedded set, text files, or what `datasets` loads, one at a time.

    data.source ─ parse_sources ─▶ names, rows in memory ─ SourceReader.open ─▶ one of four kinds:

    MemoryRows      a list of dictionaries, or an object of `datasets`
    EmbeddedRows    problems made from a seed
    TextRows        JSONL, JSON and CSV files
    DatasetRows     what `datasets` loads: the hub, copies of it, saved sets, Parquet and Arrow files

A kind knows how its rows are read, and has a fingerprint that changes when the rows do.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import math
import pickle
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rlt_lightning.console import announce, announce_reading, is_offline
from rlt_lightning.datamodules.bad_rows import TO_UTF8, NumberedRow
from rlt_lightning.datamodules.rows import has_texts
from rlt_lightning.tasks import EMBEDDED
from rlt_lightning.tasks.countdown import complete_columns
from rlt_lightning.types import BadRowError, BadRowReason, InputError, as_list

SOURCE_CHOICES = (
    "'chains' (the default), 'new_chains', 'word_sums' or 'countdown' (embedded), a .jsonl, .json, .csv, "
    ".parquet or .arrow file, a folder of such files, or a Hugging Face data set id such as "
    "'bespokelabs/Bespoke-Stratos-17k' or, with a configuration, 'openai/gsm8k:main'"
)

WEIGHTED = {"source", "weight"}  # the fields of a source with a weight


@dataclass(frozen=True, eq=False)
class MemoryRows:
    """Rows that a script passes: they are read like the lines of a JSONL file.

    Args:
        rows: A list of dictionaries, or a data set of `datasets`, with splits or without, streamed or not.
        first: Number of the first row.
    """

    rows: Any
    first: int = 1

    def __str__(self) -> str:
        is_counted = hasattr(self.rows, "__len__") and not isinstance(self.rows, Mapping)
        return f"{len(self.rows)} rows in memory" if is_counted else f"a {type(self.rows).__name__}"

    def choose(self, split: str, max_rows: int | None) -> MemoryRows:
        """Return the rows of a split, if the data set has splits; of a stream at most `max_rows`."""
        with name_unloadable(str(self), split):
            rows = choose_split(self.rows, split)
        return replace(
            self, rows=rows if hasattr(rows, "__len__") or max_rows is None else rows.take(max_rows)
        )

    def read_rows(self) -> Iterator[NumberedRow]:
        """Yield the rows with their numbers."""
        for number, row in enumerate(self.rows, start=self.first):
            yield number, read_columns(dict(row) if isinstance(row, Mapping) else row)

    def fingerprint(self) -> list[Any]:
        """Return a hash of the rows, for which a stream is read once."""
        digest = hashlib.blake2b(b"" if self.first == 1 else str(self.first).encode())
        for row in self.rows:
            # What JSON does not know counts as it is pickled.
            digest.update(json.dumps(row, default=lambda value: pickle.dumps(value).hex()).encode() + b"\n")
        return [digest.hexdigest()]


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
                "A source must be a name, a path, a list of dictionaries or a data set of `datasets`, or a "
                f"list of these, but is of type {type(value).__name__}. Convert it."
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
    """Return whether a value is rows: a data set, or a list with a dictionary that is no weighted source."""
    if isinstance(value, (list, tuple)):
        return any(isinstance(row, Mapping) and row.keys() != WEIGHTED for row in value)
    return is_dataset(value)


def is_dataset(value: Any) -> bool:
    """Return whether a value is a data set of `datasets`: with splits or without, streamed or not."""
    return type(value).__module__.partition(".")[0] == "datasets"


@dataclass(frozen=True)
class SourceReader:
    """How every source of a run is read.

    A source is rows in memory, an embedded set, a file, a folder, a hub id, or either of the last two with
    `:CONFIGURATION`.

    Args:
        split: Split of a hub data set, a saved data set, an embedded source, or a folder whose files are
            named after splits. Of what `datasets` loads also a part of it, such as `train[:10%]`.
        num_embedded_rows: Size of an embedded source.
        seed: Seed of an embedded source.
        max_rows: Most rows to read, from the start; None for all.
        streaming: Whether data sets of the hub are read row by row, not downloaded as a whole first.
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

    def open(self, source: Source) -> MemoryRows | EmbeddedRows | TextRows | DatasetRows:
        """Return what reads a source; a file is not read yet.

        Raises:
            InputError: If the source does not exist, or lacks the split.
        """
        rows: MemoryRows | EmbeddedRows | TextRows | DatasetRows
        if isinstance(source, MemoryRows):
            if is_dataset(source.rows):
                return source.choose(self.split, self.max_rows)
            rows = source
        elif source in EMBEDDED:
            rows = EmbeddedRows(source, self.num_embedded_rows, self.seed, self.split)
        else:
            rows = self._open_files(source)
        if is_part(self.split) and not isinstance(rows, DatasetRows):
            raise InputError(
                f"data.split must be a whole split for '{source}', but is {self.split}. Only what `datasets` "
                "loads has parts; set data.max_rows."
            )
        return rows

    def _open_files(self, source: str) -> TextRows | DatasetRows:
        """Return what reads a file, a folder or a data set of the hub."""
        path, (name, _, configuration) = Path(source).expanduser(), source.partition(":")
        folder = Path(name).expanduser()
        if path.is_dir() and (is_saved(path) or is_hub_folder(path)):
            return DatasetRows(source, str(path), "", self.split, self.streaming)
        if path.exists():
            files = list_files(source, self.split)
            if files[0].suffix in TABLES:
                return DatasetRows(source, TABLES[files[0].suffix], "", self.split, files=files)
            return TextRows(files)
        if name and folder.is_dir():
            return DatasetRows(source, str(folder), configuration, self.split, self.streaming)
        is_hub_id = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]+)?", source)
        starts_here = folder.parent != Path() and folder.parent.is_dir()
        if path.suffix in SUFFIXES or starts_here or not is_hub_id:
            raise InputError(f"The file or folder '{source}' must exist, but does not. Use {SOURCE_CHOICES}.")
        return DatasetRows(source, name, configuration, self.split, self.streaming)


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
    hashes: list[tuple[str, str]] = []
    for path in paths:
        with name_unreadable(path), path.open("rb") as file:
            hashes.append((path.name, hashlib.file_digest(file, "blake2b").hexdigest()))
    return hashes


# A file whose name starts with one of these belongs to that split: rows of another split must not leak in.
SPLIT_NAMES = {"train", "test", "validation", "val", "dev"}


def is_part(split: str) -> bool:
    """Return whether a split is written as a part such as `train[:10%]`, or as a sum such as `train+test`."""
    return "[" in split or "+" in split


def list_files(source: str, split: str) -> list[Path]:
    """Return a file, or the files of a folder: all of one kind, only the split's if they are named after it.

    Raises:
        InputError: If the folder has no such files.
    """
    folder = Path(source).expanduser()
    if folder.is_file():
        return [folder]
    files = [path for path in list_visible(folder) if path.suffix in SUFFIXES]
    kinds = sorted({path.suffix for path in files})
    if len(kinds) != 1:
        holds = f"holds {', '.join(kinds)}" if kinds else "holds none"
        raise InputError(
            f"A data folder must hold files of one kind ({', '.join(SUFFIXES)}) or a saved data set, but "
            f"{folder} {holds}. Name one file, or use {SOURCE_CHOICES}."
        )
    name = read_split_name(split)
    splits = {path: re.split(r"[-_.]", path.name)[0] for path in files}
    of_split = [path for path in files if splits[path] == name]
    if not of_split and (others := sorted(set(splits.values()) & SPLIT_NAMES)):
        raise InputError(
            f"The data folder {folder} must have files of the split '{name}', but has files of "
            f"{', '.join(others)}. Set data.split (of an evaluation set: its split), or name one file."
        )
    return of_split or files


# Text files: `datasets` refuses a whole file for one bad line, shifts ragged CSV silently, makes 7 of `007`


@dataclass(frozen=True)
class TextRows:
    """The rows of one file or several, numbered consecutively."""

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


BEGIN = re.compile(r"\S")  # of a value in JSON


def read_file(path: Path) -> Iterator[NumberedRow]:
    """Yield the rows of a file, numbered from 1; in a JSONL file by its lines.

    Raises:
        InputError: If it is of another kind, or cannot be read as a whole.
    """
    if path.suffix not in READERS:
        raise InputError(
            f"The data file must be {', '.join(SUFFIXES)}, but is {path}. Convert it, or use "
            f"{SOURCE_CHOICES}."
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
    """Check that a file is not a pointer that Git LFS keeps in place of it.

    Raises:
        InputError: If it is.
    """
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise InputError(
                f"The file {path} must hold rows, but is a pointer that Git LFS keeps in place of it. Run "
                f"`git lfs pull` in {path.parent}, or copy the data set with `hf download`."
            )


def parse_float(text: str) -> float | str:
    """Return a number, or its text where a float has none: Python's own reader makes infinity of 1e400."""
    value = float(text)
    return text if math.isinf(value) else value


JSON = json.JSONDecoder(parse_float=parse_float)


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
        return read_columns(JSON.decode(line.decode("utf-8-sig")))
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
            value, stop = JSON.raw_decode(text, begin.start())
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
        content = json.loads(path.read_bytes(), parse_float=parse_float)
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


@dataclass(frozen=True)
class DatasetRows:
    """A data set of the hub or a copy of one in a folder, a folder of `save_to_disk`, Parquet or Arrow files.

    Local files are streamed: so no copy of them enters the library's cache, which tells a changed file by its
    time only. A part of a split has to be loaded, each time anew.

    Args:
        source: What the user calls it.
        name: Hub id, folder, or what `datasets` calls the kind of the files.
        configuration: Which part of the data set; '' if it has only one.
        split: Which of its splits, or a part of one.
        streaming: Whether rows of the hub are read as they are asked for, rather than all before the first.
        files: The Parquet or Arrow files.
    """

    source: str
    name: str
    configuration: str
    split: str
    streaming: bool = False
    files: Sequence[Path] = ()

    @property
    def local_files(self) -> Sequence[Path]:
        """Return all files from which rows come; none for the hub."""
        return self.files or list_visible(Path(self.name))

    def load(self) -> Any:
        """Return a Dataset or an IterableDataset.

        Raises:
            InputError: If it cannot be loaded, with the library's reason.
        """
        import datasets

        if not self.local_files:
            announce(f"loading the data set {self.source} from the Hugging Face hub or its cache")
        for path in self.local_files:
            if path.suffix in SUFFIXES:
                announce_reading(path)
                require_content(path)
        with name_unloadable(self.source, self.split, is_hub=not self.local_files):
            if is_saved(Path(self.name)):
                return choose_split(load_saved(self.name), self.split)
            files = {read_split_name(self.split): [str(path) for path in self.files]} if self.files else None
            loads_part = bool(self.local_files) and is_part(self.split)
            return datasets.load_dataset(
                self.name,
                self.configuration or None,
                data_files=files,
                split=self.split,
                streaming=self.streaming or (bool(self.local_files) and not loads_part),
                download_mode="force_redownload" if loads_part else None,
            )

    def read_rows(self) -> Iterator[NumberedRow]:
        """Yield the rows, numbered from 1."""
        rows = self.load()
        with name_unloadable(self.source, self.split):
            yield from enumerate(rows, start=1)

    def fingerprint(self) -> list[Any]:
        """Return what it is read from: hashes of the files, or of a stream the addresses with the commit."""
        import datasets

        files = self.local_files
        if not files and self.streaming:
            with name_unloadable(self.source, self.split, is_hub=True):
                builder = datasets.load_dataset_builder(self.name, self.configuration or None)
            return [f"{builder.hash} {builder.config.data_files}"]
        return [
            self.configuration,
            *hash_files(files or [Path(f["filename"]) for f in self.load().cache_files]),
        ]


def is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` has written a folder."""
    return (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file()


def is_hub_folder(folder: Path) -> bool:
    """Return whether a folder is a data set as the hub keeps it: its card says which files are which."""
    if (folder / "dataset_infos.json").is_file():
        return True
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    header = text.partition("\n---")[0] if text.startswith("---\n") else ""
    return any(line.startswith(("configs:", "dataset_info:")) for line in header.splitlines())


def read_split_name(split: str) -> str:
    """Return the split of which `train[:10%]` is a part."""
    return re.split(r"[\[+]", split)[0]


def load_saved(folder: str) -> Any:
    """Load what `save_to_disk` has written; no rows if there are none, on which the library fails."""
    import datasets

    try:
        return datasets.load_from_disk(folder)
    except IndexError:
        return []


def choose_split(rows: Any, split: str) -> Any:
    """Return the rows of a split, or of a part of one, as `load_dataset` would.

    Args:
        rows: A data set of any class; one without splits is a whole split itself.
        split: Such as `train` or `train[:10%]`.

    Raises:
        ValueError: If there is no such split.
    """
    import datasets

    if isinstance(rows, dict) and split in rows:
        return rows[split]
    if not (isinstance(rows, dict) or is_part(split)):
        return rows
    splits = rows if isinstance(rows, dict) else {read_split_name(split): rows}
    sizes = {name: len(part) for name, part in splits.items()}
    parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    return datasets.concatenate_datasets(
        [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]
    )


@contextlib.contextmanager
def name_unloadable(name: str, split: str, is_hub: bool = False) -> Iterator[None]:
    """Turn a failure to load or read a data set into one line; `is_hub` says whether the hub is asked."""
    import datasets
    import pyarrow  # type: ignore[import-untyped]

    try:
        yield
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        pyarrow.ArrowException,
        datasets.exceptions.DatasetsError,
    ) as error:
        if isinstance(error, InputError):
            raise
        remedy = f"Check data.split, its files and the network, or use {SOURCE_CHOICES}."
        if is_hub and is_offline():
            download = f"hf download {name.partition(':')[0]} --repo-type dataset --local-dir FOLDER"
            remedy = f"Run `{download}` where the hub can be reached, or use {SOURCE_CHOICES}."
        raise InputError(
            f"The data set '{name}', split '{split}', could not be loaded ({shorten_error(error)}). {remedy}"
        ) from error


def shorten_error(error: Exception) -> str:
    """Return the beginning of an error's text without its line ends."""
    return " ".join(str(error).split())[:200] or type(error).__name__
