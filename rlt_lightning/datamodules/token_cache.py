"""Cache tokenised sources as Arrow files, which one process writes and all processes map into memory.

    make_items    ─ MadeItem ─▶ build_batches ─ RecordBatch ─▶ TokenCache.save ─▶ StoredSource  of one source
                                                               TokenCache.load ─────▲ │
    a batch asks for items[7] ◀─ SFTExample or Problem ◀─ StoredItems ◀───────────────┘         of all sources

A table holds token ids as int32: 4 bytes a token, where Python lists take 37 to 57. Only what was read is in
memory, and an item is built when a batch needs it.

The folder of the cache:

    KEY-DIGEST.arrow   an entry. KEY is a hash of rows, tokenizer, format, settings, and of the code that made
                       the items; DIGEST is the XXH3 of the file. The last batch has the rows that are not
                       used, each with its reason, and as metadata what else a report needs
    KEY.tmp            an unfinished entry; a killed process leaves it behind, and the next writer replaces it
    KEY.lock           held by the process that writes; the operating system frees it however the process ends

An entry gets its name only when all of it is on the disk, so there are no half entries. We do not use the
cache of `datasets`: it does not sync, and when we flipped 30 bits it silently read each as other tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast, overload

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import xxhash
from filelock import FileLock
from numpy.typing import NDArray

from rlt_lightning.console import announce, waiting_for
from rlt_lightning.datamodules.bad_rows import BadRowReport, FilterReason
from rlt_lightning.datamodules.cross_tokenizer import CrossTokenizerFormat
from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.datamodules.rows import read_number
from rlt_lightning.digests import compute_digest
from rlt_lightning.models.embedded import cache_folder
from rlt_lightning.tags import escape_half_pairs
from rlt_lightning.types import (
    BadRowError,
    BadRowReason,
    Completion,
    FinishReason,
    InputError,
    Problem,
    SFTExample,
)

Item = Problem | SFTExample
BATCH_TOKENS = 2**17  # of a record batch, about: that much is made in a second, and kept as Python lists
TOKENS = pa.list_(pa.int32())
# The numbers by which rows can be ordered; columns of a row.
DIFFICULTIES = ("pass_rate", "reward")
OF_ROW = [
    ("row", pa.int64()),
    ("prompt", pa.int32()),
    *((name, pa.float64()) for name in DIFFICULTIES),
    ("content", pa.uint64()),  # a hash of the row's columns
    ("rejected", pa.string()),  # why the row is not used; None for an item
    ("detail", pa.string()),
]
PIECES = (
    "teacher_prefix",
    "think_prefix",
    "student_prefix",
    "student_suffix",
    "solution_ids",
    "teacher_view",
)
EXAMPLES = pa.schema([*OF_ROW, ("token_ids", TOKENS), ("num_prompt", pa.int32()), ("num_cut", pa.int32())])
PROBLEMS = pa.schema(
    [
        *OF_ROW,
        *((name, TOKENS) for name in PIECES),
        ("question", pa.string()),
        ("solution", pa.string()),
        ("student_system_prompt", pa.string()),
        ("completion_ids", TOKENS),
        ("finish_reason", pa.string()),
        ("columns", pa.binary()),
    ]
)


@dataclass(frozen=True)
class MadeItem:
    """An item that was just made, with what a table holds beside it.

    Attributes:
        item: The item; its row is numbered as in its source.
        system_prompt: The system prompt under which the student sees the row.
        columns: The row as it was read.
    """

    item: Item
    system_prompt: str
    columns: dict[str, Any]


def build_batches(items: Iterable[MadeItem], prompts: dict[str, int]) -> Iterator[Any]:
    """Yield record batches of about `BATCH_TOKENS` tokens each.

    Args:
        items: The items of one source: either all are problems or all are examples.
        prompts: Gets each system prompt, with the number by which the tables name it.
    """
    rows: list[dict[str, Any]] = []
    schema, num_tokens = PROBLEMS, 0
    for made in items:
        schema = EXAMPLES if isinstance(made.item, SFTExample) else PROBLEMS
        prompt = prompts.setdefault(made.system_prompt, len(prompts))
        values = {name: read_number(made.columns, name) for name in DIFFICULTIES}
        of_row = {"row": made.item.row, "prompt": prompt, "content": hash_columns(made.columns)}
        rows.append({**of_row, **values, **flatten_item(made.item)})
        num_tokens += sum(len(rows[-1][name]) for name in ("token_ids", *PIECES) if name in rows[-1])
        if num_tokens >= BATCH_TOKENS:
            yield pa.RecordBatch.from_pylist(rows, schema)
            rows, num_tokens = [], 0
    if rows:
        yield pa.RecordBatch.from_pylist(rows, schema)


def flatten_item(item: Item) -> dict[str, Any]:
    """Return an item as the fields of a table."""
    if isinstance(item, SFTExample):
        num_prompt = item.loss_mask.index(True)
        assert all(item.loss_mask[num_prompt:]), "The loss counts an example from one token on."
        return {"token_ids": item.token_ids, "num_prompt": num_prompt, "num_cut": item.num_cut}
    given = item.given_completion
    assert given is None or given == Completion(given.token_ids, None, given.finish_reason)
    return {
        **{name: getattr(item, name) for name in (*PIECES, "question", "solution", "student_system_prompt")},
        "completion_ids": given and given.token_ids,
        "finish_reason": given and given.finish_reason,
        "columns": encode_columns(item.columns),
    }


def encode_columns(columns: dict[str, Any]) -> bytes:
    """Return a row's columns as JSON; then, if there are any that JSON does not know, as an Arrow stream.

    A zero byte, which JSON escapes, is between them.

    Raises:
        InputError: If neither can hold a value.
    """
    others = {name: value for name, value in columns.items() if type(name) is not str or not is_json(value)}
    if not others:
        return json.dumps(columns).encode()
    sink = pa.BufferOutputStream()
    try:
        known = json.dumps(columns | dict.fromkeys(others)).encode()  # the others keep their places
        batch = pa.RecordBatch.from_pylist([others])
    except (pa.ArrowException, OverflowError, TypeError, UnicodeEncodeError) as error:
        raise InputError(
            f"Columns must hold values that Arrow can store, but a row has others ({error}). Remove the "
            f"column from the source; the row has {', '.join(map(str, columns))}."
        ) from error
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return known + b"\0" + cast(bytes, sink.getvalue().to_pybytes())


def hash_columns(columns: dict[str, Any]) -> int:
    """Return a hash of a row's columns, 64 bits, alike for every kind of file; of values that JSON knows."""
    known = {name: v for name, v in columns.items() if type(name) is str and v is not None and is_json(v)}
    return xxhash.xxh3_64_intdigest(json.dumps(known, sort_keys=True).encode())


def decode_columns(encoded: bytes) -> dict[str, Any]:
    """Return the columns that `encode_columns` was given."""
    known, _, stream = encoded.partition(b"\0")
    columns = cast(dict[str, Any], json.loads(known))
    if stream:
        with pa.ipc.open_stream(stream) as reader:
            [others] = reader.read_all().to_pylist()
        columns |= others
    return columns


def is_json(value: Any) -> bool:
    """Return whether a value survives being written as JSON and read again."""
    kind = type(value)
    if kind is dict:
        return all(type(name) is str and is_json(inner) for name, inner in value.items())
    if kind is list:
        return all(map(is_json, value))
    return value is None or kind in (str, int, float, bool)


def build_item(table: Any, number: int, row: int) -> Item:
    """Return an item of a table, under the number that its row has in the run."""

    def ids(name: str) -> list[int]:
        return cast(list[int], table.column(name)[number].values.to_numpy().tolist())

    def value(name: str) -> Any:
        return table.column(name)[number].as_py()

    if is_examples(table):
        token_ids, num_prompt = ids("token_ids"), value("num_prompt")
        loss_mask = [False] * num_prompt + [True] * (len(token_ids) - num_prompt)
        return SFTExample(row, token_ids, loss_mask, value("num_cut"))
    reason: FinishReason | None = value("finish_reason")
    return Problem(
        row=row,
        question=value("question"),
        solution=value("solution"),
        **{name: ids(name) for name in PIECES},
        student_system_prompt=value("student_system_prompt"),
        given_completion=reason and Completion(ids("completion_ids"), None, reason),
        columns=decode_columns(value("columns")),
    )


def is_examples(table: Any) -> bool:
    """Return whether a table holds examples of fine-tuning."""
    return "token_ids" in table.column_names


class StoredItems(Sequence[Item]):
    """Items of several sources, or some of them. Each is built when it is asked for, and then not kept.

    Args:
        table: The items of all sources, (I, columns).
        all_rows: The number of each item's row in the run, (I,).
        all_sources: The number of each item's source, from 0, (I,).
        indices: Numbers of the items of `table` that these are; None: all of them, in order.
    """

    def __init__(
        self,
        table: Any,
        all_rows: NDArray[Any],
        all_sources: NDArray[Any],
        indices: NDArray[Any] | None = None,
    ) -> None:
        self.table, self.all_rows, self.all_sources = table, all_rows, all_sources
        self.indices = np.arange(table.num_rows) if indices is None else indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, place: int) -> Item: ...

    @overload
    def __getitem__(self, place: slice) -> StoredItems: ...

    def __getitem__(self, place: int | slice) -> Item | StoredItems:
        if isinstance(place, slice):
            return self.select(place)
        number = int(self.indices[place])
        return build_item(self.table, number, int(self.all_rows[number]))

    def __add__(self, others: StoredItems) -> StoredItems:
        return StoredItems(
            concat_tables([self.table, others.table]),
            np.concatenate([self.all_rows, others.all_rows]),
            np.concatenate([self.all_sources, others.all_sources]),
            np.concatenate([self.indices, others.indices + self.table.num_rows]),
        )

    def select(self, places: slice | NDArray[Any]) -> StoredItems:
        """Return the items at these places, or those for which an array of truth values has True."""
        return StoredItems(self.table, self.all_rows, self.all_sources, self.indices[places])

    @property
    def is_examples(self) -> bool:
        """Return whether these are examples of fine-tuning."""
        return is_examples(self.table)

    @property
    def sources(self) -> NDArray[Any]:
        """Return the number of each item's source, from 0."""
        return self.all_sources[self.indices]

    @property
    def rows(self) -> NDArray[Any]:
        """Return the number of each item's row in the run."""
        return self.all_rows[self.indices]

    def fingerprint(self) -> str:
        """Return a hash of the rows' contents and numbers, in their order."""
        contents = read_column(self.table, "content")[self.indices]
        return xxhash.xxh3_128_hexdigest(np.stack([contents, self.rows.astype(contents.dtype)]).tobytes())

    def sum_columns(self, *names: str) -> NDArray[Any]:
        """Return the sum of columns of numbers, or of the lengths of token ids, by item."""
        return np.sum([read_column(self.table, name) for name in names], axis=0)[self.indices]


def read_column(table: Any, name: str) -> NDArray[Any]:
    """Return a column of numbers; of token ids, how many there are of each item, and 0 without any."""
    column = table.column(name)
    if column.type == TOKENS:
        column = pc.fill_null(pc.list_value_length(column), 0)
    return cast(NDArray[Any], column.to_numpy())


def concat_tables(tables: Sequence[Any]) -> Any:
    """Return all items as one table, without a copy; a source without items may have other columns."""
    return pa.concat_tables([table for table in tables if table.num_rows] or tables[:1])


# The cache

UNUSED_DAYS = 60  # after which an entry is deleted


@dataclass
class StoredSource:
    """The items made of one source's rows, and a report of the rows that are not used.

    Attributes:
        report: The rows that are not used.
        table: The items.
        prompts: The system prompts under which the student sees rows, with their numbers in the table.
    """

    report: BadRowReport
    table: Any = None
    prompts: dict[str, int] = field(default_factory=dict)

    def build_last_batch(self, schema: Any) -> tuple[Any, dict[str, str]]:
        """Return a batch of the rows that are not used, and its metadata: counts and system prompts."""
        bad = [(row, error.reason, error.detail) for row, error in self.report.bad]
        rows = [
            {"row": row, "rejected": str(reason), "detail": escape_half_pairs(detail)}
            for row, reason, detail in (*bad, *self.report.filtered)
        ]
        totals = [self.report.num_rows, self.report.last_row, list(self.prompts)]
        return pa.RecordBatch.from_pylist(rows, schema), {"totals": json.dumps(totals)}

    @staticmethod
    def read(path: Path, source: str) -> StoredSource:
        """Check an entry and map it into memory, which token ids enter when they are needed.

        Raises:
            InputError: If it is not as it was written.
        """
        if compute_digest(path) != path.stem.rpartition("-")[2]:
            raise InputError(
                f"The file {path} must be as it was written, but has another digest. Delete it: the run then "
                "makes it again."
            )
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        *batches, last = map(reader.get_batch, range(reader.num_record_batches))
        metadata = reader.get_batch_with_custom_metadata(len(batches)).custom_metadata
        num_rows, last_row, prompts = json.loads(metadata[b"totals"])
        report = BadRowReport(source, num_rows, last_row=last_row)
        for row in last.select(["row", "rejected", "detail"]).to_pylist():
            number, reason, detail = row.values()
            if reason in list(BadRowReason):
                report.bad.append((number, BadRowError(BadRowReason(reason), detail)))
            else:
                report.filtered.append((number, FilterReason(reason), detail))
        table = pa.Table.from_batches(batches)
        if is_examples(table):
            report.truncated = np.unique(
                read_column(table, "row")[read_column(table, "num_cut") > 0]
            ).tolist()
        return StoredSource(report, table, {prompt: number for number, prompt in enumerate(prompts)})


class TokenCache:
    """Tokenised sources by key.

    Args:
        folder: Where they lie; None: nowhere, and every process keeps its own in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def load(self, key: str, source: str) -> StoredSource | None:
        """Map the entry of a key; None if there is none.

        Args:
            key: See `build_keys`.
            source: Name of the source, for messages.

        Raises:
            InputError: If the entry was damaged from outside.
        """
        entry = self._find(key)
        if entry is None:
            return None
        with contextlib.suppress(OSError):  # a cache of another user, which this one only reads
            os.utime(entry)
        return StoredSource.read(entry, source)

    def _find(self, key: str) -> Path | None:
        return None if self.folder is None else next(self.folder.glob(f"{key}-*.arrow"), None)

    def save(self, key: str, items: Iterable[MadeItem], report: BadRowReport) -> StoredSource:
        """Write the items of a source as the entry of a key, and map it.

        What fits into one record batch is made within a second or two: it stays in memory, and is not
        written. If another process writes the same entry, this one waits and maps it; of `items` it then
        takes no more.

        Args:
            key: See `build_keys`.
            items: Makes the items, one at a time.
            report: The source's rows that are not used: complete when the last item was taken.

        Raises:
            InputError: If the folder cannot be written.
        """
        made = StoredSource(report)
        batches = build_batches(items, made.prompts)
        first = list(islice(batches, 2))
        if self.folder is None or len(first) < 2:
            few = [*first, *batches]
            made.table = pa.Table.from_batches(few, None if few else PROBLEMS)
            return made
        with name_unwritable(self.folder), contextlib.ExitStack() as stack:
            self.folder.mkdir(parents=True, exist_ok=True)
            with waiting_for(f"another process to tokenise {report.source} into {self.folder}"):
                stack.enter_context(FileLock(self.folder / f"{key}.lock"))
            # Another process may have made it while this one waited for the lock.
            entry = self._find(key)
            if entry is None:
                entry = write_entry(self.folder / key, made, chain(first, batches))
                delete_unused(self.folder)
        return StoredSource.read(entry, report.source)


def write_entry(path: Path, made: StoredSource, batches: Iterator[Any]) -> Path:
    """Write an entry under another name, and rename it when it is on the disk.

    Args:
        path: The folder of the cache and the key.
        made: What the last batch completes.
        batches: Record batches.

    Returns:
        The entry's file.
    """
    scratch = path.with_name(f"{path.name}.tmp")
    first = next(batches)
    try:
        with scratch.open("wb") as file:
            with pa.ipc.new_file(file, first.schema) as writer:
                for batch in chain([first], batches):
                    writer.write_batch(batch)
                writer.write_batch(*made.build_last_batch(first.schema))
            file.flush()
            os.fsync(file.fileno())
        entry = scratch.rename(path.with_name(f"{path.name}-{compute_digest(scratch)}.arrow"))
    finally:
        scratch.unlink(missing_ok=True)
    if (size := entry.stat().st_size) > 10**8:
        announce(f"tokenised {made.report.source} into {entry} ({size / 1e9:.1f} GB), for later starts too")
    return entry


@contextlib.contextmanager
def name_unwritable(folder: Path) -> Iterator[None]:
    """Turn a failure to write the folder into an error that names the setting of the folder."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"The folder of tokenised rows, {folder}, must be writable and have room, but is not ({error}). "
            "Set data.token_cache to another folder, or to false: each process then keeps its own."
        ) from error


def delete_unused(folder: Path) -> None:
    """Delete what was not used for `UNUSED_DAYS`: entries, and what killed processes left behind."""
    oldest = time.time() - UNUSED_DAYS * 24 * 3600
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another process deletes it too, or it is another user's
            # A user's folder may hold other files, which are not ours to delete.
            if re.match(r"[0-9a-f]{32}\W", path.name) and path.stat().st_mtime < oldest:
                path.unlink()


def find_token_folder(setting: bool | str) -> Path | None:
    """Return the folder that `data.token_cache` chooses; None for none."""
    if isinstance(setting, bool):
        return cache_folder() / "tokens" if setting else None
    return Path(setting).expanduser()


def join_items(sources: list[StoredSource]) -> StoredItems:
    """Return the items of all sources."""
    rows = [read_column(source.table, "row") + source.report.first_row - 1 for source in sources]
    numbers = np.repeat(np.arange(len(sources)), [source.table.num_rows for source in sources])
    return StoredItems(concat_tables([source.table for source in sources]), np.concatenate(rows), numbers)


def count_system_prompts(items: StoredItems, sources: list[StoredSource]) -> Counter[str]:
    """Return the system prompts under which the student sees items of these sources, counted."""
    prompts = [list(source.prompts) for source in sources]
    places = zip(items.sources.tolist(), items.sum_columns("prompt").tolist(), strict=True)
    return Counter(prompts[source][number] for source, number in places)


# The key of an entry: a change of anything that decides its items makes another key

PACKAGE = Path(__file__).parents[1]
# The code that makes items; an entry of another version of it is not used.
CODE = (
    "datamodules/*.py",
    "tasks/*.py",
    "judging/*.py",
    "models/format.py",
    "models/template.py",
    "tags.py",
    "types.py",
)
LIBRARIES = ("transformers", "tokenizers", "jinja2", "math-verify")
QUESTION = "What is 1 + 1?"


def hash_value(value: Any) -> str:
    """Return a hash of plain values; dictionaries count in any order."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@cache
def hash_code() -> str:
    """Return a hash of the code and the libraries that make items."""
    files = [path for pattern in CODE for path in sorted(PACKAGE.glob(pattern))]
    return hash_value([[path.read_text(encoding="utf-8") for path in files], list(map(version, LIBRARIES))])


def describe_format(chat_format: ChatFormat) -> dict[str, Any]:
    """Return what decides the tokens of a text, as plain values.

    Two rendered conversations are among them: a template may print special tokens. The date is in its text.
    """
    tokenizer = chat_format.tokenizer
    return {
        "tokenizer": hash_value(tokenizer.backend_tokenizer.to_str()),
        "special_tokens": [tokenizer.eos_token_id, getattr(tokenizer, "split_special_tokens", None)],
        "template": tokenizer.chat_template,
        "conversations": [
            chat_format.render_teacher_chat(QUESTION),
            chat_format.render_student_chat(QUESTION),
        ],
        "tags": asdict(chat_format.tags),
        "student_tags": asdict(chat_format.student_tags),
        "prompts": [chat_format.teacher_system_prompt, chat_format.student_system_prompt],
        "student": describe_format(chat_format.student)
        if isinstance(chat_format, CrossTokenizerFormat)
        else None,
    }
