"""Tokenised sources: items as Arrow tables, in files that one process writes and all map into memory.

    make_items    ─ MadeItem ─▶ build_batches ─ RecordBatch ─▶ TokenCache.save ─▶ ItemTable   of one source
                                                               TokenCache.load ─────▲ │
    a batch asks for items[7] ◀─ SFTExample or Problem ◀─ StoredItems ◀───────────────┘       of all sources

A table has int32 token ids: 4 bytes a token, of which only those are in memory that were read. Python lists
cost 37 to 57. An item is built from them when a batch needs it.

The folder of the cache:

    KEY          a hash of rows, tokenizer, format, settings, and of the code that made the items
    KEY/         items.arrow, the items; report.json, the rows that are not used, and the system prompts;
                 rank0.xxh128, the digests of both (digests.py)
    KEY.tmp/     is being written; a killed process leaves it behind, and the next writer deletes it
    KEY.lock     held by the process that writes; the operating system frees it however the process ends

An entry gets its name only when all of it is on the disk. So there are no half entries.
`datasets.Dataset.from_generator` could keep the items, but not the report with them in one step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, cast, overload

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from filelock import FileLock
from numpy.typing import NDArray

from rlt_lightning.console import announce, waiting_for
from rlt_lightning.datamodules.bad_rows import BadRowReport
from rlt_lightning.datamodules.cross_tokenizer import CrossTokenizerFormat
from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.datamodules.rows import read_number
from rlt_lightning.digests import require_digests, write_digests
from rlt_lightning.models.embedded import cache_folder
from rlt_lightning.types import Completion, FinishReason, InputError, Problem, SFTExample

Item = Problem | SFTExample
BATCH_TOKENS = 2**17  # of a record batch, about: that much is made in a second, and kept as Python lists
TOKENS = pa.list_(pa.int32())
# The numbers by which rows can be ordered; columns of a row.
DIFFICULTIES = ("pass_rate", "reward")
OF_ITEM = [("row", pa.int64()), ("prompt", pa.int32()), *((name, pa.float64()) for name in DIFFICULTIES)]
PIECES = (
    "teacher_prefix",
    "think_prefix",
    "student_prefix",
    "student_suffix",
    "solution_ids",
    "teacher_view",
)
EXAMPLES = pa.schema([*OF_ITEM, ("token_ids", TOKENS), ("num_prompt", pa.int32()), ("num_cut", pa.int32())])
PROBLEMS = pa.schema(
    [
        *OF_ITEM,
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
        rows.append({"row": made.item.row, "prompt": prompt, **values, **flatten_item(made.item)})
        num_tokens += sum(len(rows[-1][name]) for name in ("token_ids", *PIECES) if name in rows[-1])
        if num_tokens >= BATCH_TOKENS:
            yield pa.RecordBatch.from_pylist(rows, schema)
            rows, num_tokens = [], 0
    if rows:
        yield pa.RecordBatch.from_pylist(rows, schema)


def flatten_item(item: Item) -> dict[str, Any]:
    """Return the fields by which a table holds an item."""
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
    """Return a row's columns as JSON, or as an Arrow stream if they hold what JSON does not know.

    Raises:
        InputError: If neither can hold a value.
    """
    if is_json(columns):
        return json.dumps(columns).encode()
    sink = pa.BufferOutputStream()
    try:
        batch = pa.RecordBatch.from_pylist([columns])
    except pa.ArrowException as error:
        raise InputError(
            f"Columns must hold values that Arrow can store, but a row has others ({error}). Remove the "
            f"column from the source; the row has {', '.join(map(str, columns))}."
        ) from error
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return cast(bytes, sink.getvalue().to_pybytes())


def decode_columns(encoded: bytes) -> dict[str, Any]:
    """Return the columns that `encode_columns` was given."""
    if encoded.startswith(b"{"):
        return cast(dict[str, Any], json.loads(encoded))
    with pa.ipc.open_stream(encoded) as reader:
        [columns] = reader.read_all().to_pylist()
    return cast(dict[str, Any], columns)


def is_json(value: Any) -> bool:
    """Return whether JSON gives a value back as it is."""
    kind = type(value)
    if kind is dict:
        return all(type(name) is str and is_json(inner) for name, inner in value.items())
    if kind is list:
        return all(map(is_json, value))
    return value is None or kind in (str, int, float, bool)


class ItemTable:
    """The items of one source.

    Args:
        batches: Record batches of `EXAMPLES` or of `PROBLEMS`.
    """

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.is_examples = bool(batches) and "token_ids" in batches[0].schema.names
        self.starts = list(accumulate((batch.num_rows for batch in batches), initial=0))

    def __len__(self) -> int:
        return self.starts[-1]

    def build_item(self, number: int, first_row: int) -> Item:
        """Return one item, of a source whose row 1 has a number in the run."""
        place = bisect_right(self.starts, number) - 1
        batch, number = self.batches[place], number - self.starts[place]

        def ids(name: str) -> list[int]:
            return cast(list[int], batch.column(name)[number].values.to_numpy().tolist())

        def value(name: str) -> Any:
            return batch.column(name)[number].as_py()

        row = value("row") + first_row - 1
        if self.is_examples:
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

    def read_column(self, name: str) -> NDArray[Any]:
        """Return a column of numbers; of token ids, how many there are of each item, and 0 without any."""
        columns = [batch.column(name) for batch in self.batches]
        if columns and columns[0].type == TOKENS:
            columns = [column.value_lengths().fill_null(0) for column in columns]
        return np.concatenate([np.zeros(0, np.int64), *(c.to_numpy(zero_copy_only=False) for c in columns)])


class StoredItems(Sequence[Item]):
    """Items of several sources, or some of them. Each is built when it is asked for, and then not kept.

    Args:
        tables: The tables of the sources.
        first_rows: The number in the run of each source's row 1.
        indices: Numbers of the items, over all tables; None: all of them, in order.
    """

    def __init__(
        self, tables: Sequence[ItemTable], first_rows: Sequence[int], indices: NDArray[Any] | None = None
    ) -> None:
        self.tables, self.first_rows = tuple(tables), tuple(first_rows)
        self.starts = list(accumulate(map(len, self.tables), initial=0))
        self.indices = np.arange(self.starts[-1]) if indices is None else indices

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
        table = bisect_right(self.starts, number) - 1
        return self.tables[table].build_item(number - self.starts[table], self.first_rows[table])

    def __add__(self, others: StoredItems) -> StoredItems:
        indices = np.concatenate([self.indices, others.indices + self.starts[-1]])
        return StoredItems(self.tables + others.tables, self.first_rows + others.first_rows, indices)

    def select(self, places: slice | NDArray[Any]) -> StoredItems:
        """Return the items at these places, or those for which an array of truth values has True."""
        return StoredItems(self.tables, self.first_rows, self.indices[places])

    @property
    def is_examples(self) -> bool:
        """Return whether these are examples of fine-tuning."""
        return any(table.is_examples for table in self.tables)

    @property
    def sources(self) -> NDArray[Any]:
        """Return the number of each item's source, from 0."""
        return np.searchsorted(self.starts, self.indices, side="right") - 1

    @property
    def rows(self) -> NDArray[Any]:
        """Return the number of each item's row in the run."""
        return self.sum_columns("row") + np.array(self.first_rows)[self.sources] - 1

    def sum_columns(self, *names: str) -> NDArray[Any]:
        """Return the sum of columns of numbers, or of the lengths of token ids, by item."""
        columns = [np.concatenate([table.read_column(name) for table in self.tables]) for name in names]
        return np.sum(columns, axis=0)[self.indices]


# The cache

ITEMS, REPORT = "items.arrow", "report.json"
UNUSED_DAYS = 60  # after which an entry is deleted


@dataclass
class StoredSource:
    """What became of the rows of one source.

    Attributes:
        report: The rows that are not used.
        table: The items.
        prompts: The system prompts under which the student sees rows, with their numbers in the table.
    """

    report: BadRowReport
    table: ItemTable = field(default_factory=lambda: ItemTable([]))
    prompts: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return all but the table, for JSON."""
        last_row = self.report.last_row
        return {"prompts": list(self.prompts), "last_row": last_row, "report": self.report.as_dict()}


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
        if self.folder is None or not (entry := self.folder / key).is_dir():
            return None
        with contextlib.suppress(OSError):  # a cache of another user, which this one only reads
            os.utime(entry)
        return read_entry(entry, source)

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
            made.table = ItemTable([*first, *batches])
            return made
        entry = self.folder / key
        with name_unwritable(self.folder), contextlib.ExitStack() as stack:
            self.folder.mkdir(parents=True, exist_ok=True)
            with waiting_for(f"another process to tokenise {report.source} into {self.folder}"):
                stack.enter_context(FileLock(f"{entry}.lock"))
            # Another process may have made it while this one waited for the lock.
            if not entry.is_dir():
                write_entry(entry, made, chain(first, batches))
                delete_unused(self.folder)
        return read_entry(entry, report.source)


def write_entry(entry: Path, made: StoredSource, batches: Iterator[Any]) -> None:
    """Write an entry under another name, and rename it.

    Args:
        entry: The folder.
        made: What the last batch completes.
        batches: Record batches.
    """
    scratch = entry.with_name(f"{entry.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    first = next(batches)
    try:
        with (scratch / ITEMS).open("wb") as file:
            with pa.ipc.new_file(file, first.schema) as writer:
                for batch in chain([first], batches):
                    writer.write_batch(batch)
            sync_file(file)
        with (scratch / REPORT).open("w", encoding="utf-8") as file:
            json.dump(made.as_dict(), file)
            sync_file(file)
        write_digests(scratch, [scratch / ITEMS, scratch / REPORT])
        scratch.rename(entry)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if (size := (entry / ITEMS).stat().st_size) > 10**8:
        announce(f"tokenised {made.report.source} into {entry} ({size / 1e9:.1f} GB), for later starts too")


def sync_file(file: Any) -> None:
    """Wait until a file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def read_entry(entry: Path, source: str) -> StoredSource:
    """Check an entry and map it into memory, which token ids enter when they are needed.

    Raises:
        InputError: If it is not as it was written.
    """
    require_digests(entry, "Delete this folder: the run then makes it again.")
    found = json.loads((entry / REPORT).read_text(encoding="utf-8"))
    reader = pa.ipc.open_file(pa.memory_map(str(entry / ITEMS)))
    batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
    report = BadRowReport.from_dict({**found["report"], "source": source})
    prompts = {prompt: number for number, prompt in enumerate(found["prompts"])}
    report.last_row = found["last_row"]
    return StoredSource(report, ItemTable(batches), prompts)


@contextlib.contextmanager
def name_unwritable(folder: Path) -> Iterator[None]:
    """Name the settings that choose the folder if it cannot be written."""
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
            if re.match(r"[0-9a-f]{32}(\W|$)", path.name) and path.stat().st_mtime < oldest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def find_token_folder(setting: bool | str) -> Path | None:
    """Return the folder that `data.token_cache` chooses; None for none."""
    if isinstance(setting, bool):
        return cache_folder() / "tokens" if setting else None
    return Path(setting).expanduser()


def join_items(sources: list[StoredSource]) -> StoredItems:
    """Return the items of all sources."""
    return StoredItems([source.table for source in sources], [source.report.first_row for source in sources])


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
