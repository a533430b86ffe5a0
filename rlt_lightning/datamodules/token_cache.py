"""Keep tokenised rows as Arrow tables: those of files and of the hub on the disk, mapped into memory.

    make_items ─ fields of an item, or of a row that is not used ─▶ build_table ─▶ a table of all sources
    a batch asks for items[7] ◀─ SFTExample or Problem ◀─ StoredItems ◀────────────┘

A table holds token ids as int32: 4 bytes a token, where Python lists take 37 to 57. `datasets` writes it in
one process, while the others wait. Its name is a hash of rows, tokenizer, format, settings, and of the
versions of what makes items.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from itertools import islice
from typing import Any, cast, overload

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import xxhash
from numpy.typing import NDArray

from rlt_lightning.datamodules.bad_rows import BadRowReport
from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.datamodules.sources import shorten_error
from rlt_lightning.models.embedded import cache_folder
from rlt_lightning.run import __version__
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
CHUNK_ROWS = 64  # that are Python lists at a time
TOKENS = pa.list_(pa.int32())
PIECES = (
    "teacher_prefix",
    "think_prefix",
    "student_prefix",
    "student_suffix",
    "solution_ids",
    "teacher_view",
)
SCHEMA = pa.schema(
    [
        ("source", pa.int32()),  # its number, from 0
        ("row", pa.int64()),  # its number in the run, from 1
        ("is_first", pa.bool_()),  # of the items of its row; a row that is not used has one entry
        ("rejected", pa.string()),  # why the row is not used; None for an item
        ("detail", pa.string()),
        ("system_prompt", pa.string()),  # under which the student sees the row
        ("content", pa.int64()),  # a hash of the row's columns
        ("token_ids", TOKENS),  # of an example of fine-tuning; all further columns are of problems
        ("num_prompt", pa.int32()),
        ("num_cut", pa.int32()),
        *((name, TOKENS) for name in PIECES),
        ("question", pa.string()),
        ("solution", pa.string()),
        ("student_system_prompt", pa.string()),
        ("completion_ids", TOKENS),
        ("finish_reason", pa.string()),
        ("columns", pa.binary()),
    ]
)


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
        "columns": pickle.dumps(item.columns),
    }


def hash_columns(columns: dict[str, Any]) -> int:
    """Return a hash of a row's columns, 64 bits, alike for every kind of file."""
    known = {name: value for name, value in columns.items() if value is not None}
    text = json.dumps(known, sort_keys=True, default=lambda value: pickle.dumps(value).hex())
    return int.from_bytes(xxhash.xxh3_64_digest(text.encode()), signed=True)


def build_table(make_rows: Callable[[], Iterator[dict[str, Any]]], key: str | None) -> Any:
    """Return a table of the rows, or the one of this key that an earlier run or another process has written.

    Args:
        make_rows: Makes the fields of each row.
        key: See `hash_value`; None keeps the table in the memory of this process.

    Raises:
        InputError: If the folder cannot be written.
    """
    if key is None:
        rows = make_rows()
        chunks = iter(lambda: list(islice(rows, CHUNK_ROWS)), [])
        return pa.Table.from_batches([pa.RecordBatch.from_pylist(chunk, SCHEMA) for chunk in chunks], SCHEMA)
    import datasets

    folder = cache_folder() / "tokens"
    try:
        return datasets.Dataset.from_generator(
            make_rows,
            datasets.Features.from_arrow_schema(SCHEMA),
            cache_dir=str(folder),
            fingerprint=key,
            writer_batch_size=CHUNK_ROWS,
        ).data.table
    except (OSError, datasets.exceptions.DatasetGenerationError) as error:
        cause = error.__cause__ or error
        if not isinstance(cause, OSError):
            raise cause from None
        raise InputError(
            f"The folder of tokenised rows, {folder}, must be writable and have room, but is not "
            f"({shorten_error(cause)}). Set RLT_CACHE_DIR to another folder."
        ) from error


def build_item(table: Any, number: int) -> Item:
    """Return an item of a table."""

    def ids(name: str) -> list[int]:
        return cast(list[int], table.column(name)[number].values.to_numpy().tolist())

    def value(name: str) -> Any:
        return table.column(name)[number].as_py()

    if (num_prompt := value("num_prompt")) is not None:
        token_ids = ids("token_ids")
        loss_mask = [False] * num_prompt + [True] * (len(token_ids) - num_prompt)
        return SFTExample(value("row"), token_ids, loss_mask, value("num_cut"))
    reason: FinishReason | None = value("finish_reason")
    return Problem(
        row=value("row"),
        question=value("question"),
        solution=value("solution"),
        **{name: ids(name) for name in PIECES},
        student_system_prompt=value("student_system_prompt"),
        given_completion=reason and Completion(ids("completion_ids"), None, reason),
        columns=pickle.loads(value("columns")),
    )


class StoredItems(Sequence[Item]):
    """Items of a table, or some of them. Each is built when it is asked for, and then not kept.

    Args:
        table: The items and the rows that are not used, (I, columns).
        indices: Numbers of the entries of `table` that these are; None: all items, in order.
    """

    def __init__(self, table: Any, indices: NDArray[Any] | None = None) -> None:
        self.table = table
        is_item = table["rejected"].is_null().to_numpy()
        self.indices = np.flatnonzero(is_item) if indices is None else indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> StoredItems: ...

    def __getitem__(self, index: int | slice) -> Item | StoredItems:
        if isinstance(index, slice):
            return self.select(index)
        return build_item(self.table, int(self.indices[index]))

    def __add__(self, others: StoredItems) -> StoredItems:
        indices = np.concatenate([self.indices, others.indices + self.table.num_rows])
        return StoredItems(pa.concat_tables([self.table, others.table]), indices)

    def select(self, chosen: slice | NDArray[Any]) -> StoredItems:
        """Return the items at these indices, or those for which an array of truth values has True."""
        return StoredItems(self.table, self.indices[chosen])

    @property
    def is_examples(self) -> bool:
        """Return whether these are examples of fine-tuning."""
        return bool(self.table["num_prompt"].null_count < self.table.num_rows)

    @property
    def sources(self) -> NDArray[Any]:
        """Return the number of each item's source, from 0."""
        return self.sum_columns("source")

    @property
    def rows(self) -> NDArray[Any]:
        """Return the number of each item's row in the run."""
        return self.sum_columns("row")

    def fingerprint(self) -> str:
        """Return a hash of the rows' contents and numbers, in their order."""
        return xxhash.xxh3_128_hexdigest(np.stack([self.sum_columns("content"), self.rows]).tobytes())

    def count_system_prompts(self) -> Counter[str]:
        """Return the system prompts under which the student sees the items, counted."""
        return Counter(self.table["system_prompt"].take(self.indices).to_pylist())

    def find_largest(self, *names: str) -> int:
        """Return the largest token id in some columns of the table."""
        largest = [pc.max(pc.list_flatten(self.table[name])).as_py() for name in names]
        return max((number for number in largest if number is not None), default=0)

    def sum_columns(self, *names: str) -> NDArray[Any]:
        """Return the sum of columns of numbers, or of the lengths of token ids, by item."""
        columns = [self.table[name] for name in names]
        numbers = [pc.list_value_length(column) if column.type == TOKENS else column for column in columns]
        return cast(NDArray[Any], sum(pc.fill_null(some, 0).to_numpy() for some in numbers))[self.indices]


def read_reports(table: Any, sources: Sequence[str]) -> list[BadRowReport]:
    """Return a report of the rows that are not used for each source of a table."""
    reports: list[BadRowReport] = []
    first_row = 1
    for number, source in enumerate(sources):
        rows = table.select(["source", "row", "is_first", "rejected", "detail", "num_cut"])
        rows = rows.filter(pc.equal(rows["source"], number))
        report = BadRowReport(source, pc.sum(rows["is_first"]).as_py() or 0, first_row)
        for row in rows.filter(rows["rejected"].is_valid()).sort_by("row").to_pylist():
            error = BadRowError(BadRowReason(row["rejected"]), row["detail"])
            report.bad.append((row["row"] - first_row + 1, error))
        cut = rows.filter(pc.greater(rows["num_cut"], 0))["row"]
        report.truncated = (np.unique(cut) - first_row + 1).tolist()
        reports.append(report)
        first_row = (pc.max(rows["row"]).as_py() or 0) + 1
    return reports


# The key of a table: a change of anything that decides its items makes another key

# Raise it when the same rows and settings give other items than before, or the table has other columns.
VERSION = 1
LIBRARIES = ("transformers", "tokenizers", "jinja2", "math-verify")
QUESTION = "What is 1 + 1?"


def hash_value(value: Any) -> str:
    """Return a hash of plain values; dictionaries count in any order."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def list_versions() -> list[Any]:
    """Return the versions of the items, of this package and of the libraries that make them."""
    return [VERSION, __version__, *map(version, LIBRARIES)]


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
        "student": chat_format.student and describe_format(chat_format.student),
    }
