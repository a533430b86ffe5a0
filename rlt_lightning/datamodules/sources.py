"""Read rows from memory, an embedded set, a file, a folder or the hub, one at a time."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rlt_lightning.datamodules.bad_rows import NumberedRow
from rlt_lightning.datamodules.files import READERS, columns_of, read_file, readable
from rlt_lightning.datamodules.hub import (
    SOURCE_CHOICES,
    is_hub_folder,
    is_saved,
    load_hub,
    load_saved,
    rows_of,
    version_of,
)
from rlt_lightning.datamodules.rows import has_texts
from rlt_lightning.tasks import EMBEDDED
from rlt_lightning.tasks.countdown import complete_columns
from rlt_lightning.types import BadRowError, InputError, as_list

WEIGHTED = {"source", "weight"}  # the fields of a source with a weight


@dataclass(frozen=True, eq=False)
class MemoryRows:
    """Rows that a script brings: they are read as the lines of a JSONL file would be.

    Args:
        rows: A list of dictionaries, or a `datasets.Dataset`.
    """

    rows: Any

    def __str__(self) -> str:
        return f"{len(self.rows)} rows in memory"

    def numbered(self) -> Iterator[NumberedRow]:
        """Yield the rows with their numbers."""
        for number, row in enumerate(self.rows, start=1):
            yield number, columns_of(dict(row) if isinstance(row, Mapping) else row)

    def digest(self) -> str:
        """Return a hash of the rows."""
        found = hashlib.blake2b()
        for row in self.rows:
            # What JSON does not know counts as it is pickled.
            found.update(json.dumps(row, default=lambda value: pickle.dumps(value).hex()).encode() + b"\n")
        return found.hexdigest()


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


def sources_of(setting: Any) -> list[Source]:
    """Return the sources that `data.source` or `data.val_source` names; a list of dictionaries is one source.

    Raises:
        InputError: If one is neither a name nor rows.
    """
    found: list[Source] = []
    for value, _ in _weighted(setting):
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


def weights_of(setting: Any) -> list[float]:
    """Return the weight of each source of a setting; an empty list if none has one.

    Raises:
        InputError: If only some have one.
    """
    weights = [weight for _, weight in _weighted(setting)]
    known = [weight for weight in weights if weight is not None]
    if known and len(known) < len(weights):
        without = sources_of(setting)[weights.index(None)]
        raise InputError(
            f"Either all sources of data.source have a weight or none, but '{without}' has none. Write it as "
            f"{{source: {without}, weight: 1}}."
        )
    return known


def names_of(setting: Any) -> str:
    """Return the names of a setting's sources, for a message."""
    return ", ".join(map(str, sources_of(setting)))


def _weighted(setting: Any) -> list[tuple[Any, float | None]]:
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
        for number, columns in islice(self._numbered_rows(source), self.max_rows):
            yield number, complete(columns)
        if not number:
            raise InputError(
                f"The source must have at least one row, but '{source}' has none. Use {SOURCE_CHOICES}."
            )

    def fingerprint(self, source: Source) -> list[Any]:
        """Return plain values that change when the rows of a source do.

        Raises:
            InputError: If the source does not exist.
        """
        settings = [self.split, self.max_rows]
        if isinstance(source, MemoryRows):
            return [*settings, source.digest()]
        if source in EMBEDDED:
            return [*settings, list(self._numbered_rows(source))]
        name = hub_name(source)
        folder = Path(source if name is None else name[0]).expanduser()
        if name is None and not is_saved(folder):
            files = files_of(source, self.split)
        elif folder.is_dir():
            files = visible_files(folder)
        elif self.streaming:
            assert name is not None
            return [*settings, version_of(*name, self.split)]
        else:
            assert name is not None
            dataset = load_hub(*name, self.split, streaming=False)
            settings.append(dataset._fingerprint)
            files = [Path(file["filename"]) for file in dataset.cache_files]
        return [*settings, name and name[1], [(file.name, digest_of(file)) for file in files]]

    def _numbered_rows(self, source: Source) -> Iterator[NumberedRow]:
        if isinstance(source, MemoryRows):
            yield from source.numbered()
            return
        folder = Path(source).expanduser()
        if source in EMBEDDED:
            rows = EMBEDDED[source](self.num_embedded_rows, self.seed, self.split)
            yield from enumerate(rows, start=1)
        elif (name := hub_name(source)) is not None:
            yield from rows_of(load_hub(*name, self.split, self.streaming), source, self.split)
        elif folder.is_dir() and is_saved(folder):
            yield from enumerate(load_saved(folder, self.split), start=1)
        else:
            offset = 0
            for path in files_of(source, self.split):
                number = 0
                for number, columns in read_file(path):
                    yield offset + number, columns
                offset += number


def complete(columns: dict[str, Any] | BadRowError) -> dict[str, Any] | BadRowError:
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


def hub_name(source: str) -> tuple[str, str] | None:
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


def visible_files(folder: Path) -> list[Path]:
    """Return the files of a folder and of its sub-folders, in order; hidden ones left out."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]


def digest_of(path: Path) -> str:
    """Return a hash of a file's contents."""
    with readable(path), path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


# A file whose name starts with one of these belongs to that split: rows of another split must not leak in.
SPLIT_NAMES = {"train", "test", "validation", "val", "dev"}


def files_of(source: str, split: str) -> list[Path]:
    """Return a file, or the files of a folder: all of one kind, only the split's if they are named after it.

    Raises:
        InputError: If the folder has no such files.
    """
    folder = Path(source).expanduser()
    if folder.is_file():
        return [folder]
    files = [path for path in visible_files(folder) if path.suffix in READERS]
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
