"""Items as Arrow tables: int32 token ids, which may lie in a file, and become items when a batch needs them.

    make_items ─ MadeItem ─▶ batches_of ─ RecordBatch ─▶ a file or memory ─▶ ItemTable   of one source
                                                                                 │
    a batch asks for items[7] ◀─ SFTExample or Problem ◀─ StoredItems ◀──────────┘       of all sources

A table costs 4 bytes a token, of which only those are in memory that were read; Python lists cost 37 to 57.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast, overload

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from numpy.typing import NDArray

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


def batches_of(made: Iterable[MadeItem], is_examples: bool, prompts: dict[str, int]) -> Iterator[Any]:
    """Yield record batches of about `BATCH_TOKENS` tokens each.

    Args:
        made: The items of one source.
        is_examples: Whether they are examples of fine-tuning; otherwise they are problems.
        prompts: Gets each system prompt, with the number by which the tables name it.
    """
    schema = EXAMPLES if is_examples else PROBLEMS
    rows: list[dict[str, Any]] = []
    num_tokens = 0
    for one in made:
        prompt = prompts.setdefault(one.system_prompt, len(prompts))
        values = {name: number_in(one.columns, name) for name in DIFFICULTIES}
        rows.append({"row": one.item.row, "prompt": prompt, **values, **fields_of(one.item)})
        num_tokens += sum(len(rows[-1][name]) for name in ("token_ids", *PIECES) if name in rows[-1])
        if num_tokens >= BATCH_TOKENS:
            yield pa.RecordBatch.from_pylist(rows, schema)
            rows, num_tokens = [], 0
    if rows:
        yield pa.RecordBatch.from_pylist(rows, schema)


def number_in(columns: dict[str, Any], name: str) -> float | None:
    """Return a row's number; None for what is no number, such as a text or a truth value."""
    value = columns.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def fields_of(item: Item) -> dict[str, Any]:
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

    def item(self, number: int, first_row: int) -> Item:
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

    def numbers(self, name: str) -> NDArray[Any]:
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
        chosen: Numbers of the items, over all tables; None: all of them, in order.
    """

    def __init__(
        self, tables: Sequence[ItemTable], first_rows: Sequence[int], chosen: NDArray[Any] | None = None
    ) -> None:
        self.tables, self.first_rows = tuple(tables), tuple(first_rows)
        self.starts = list(accumulate(map(len, self.tables), initial=0))
        self.chosen = np.arange(self.starts[-1]) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self.chosen)

    @overload
    def __getitem__(self, place: int) -> Item: ...

    @overload
    def __getitem__(self, place: slice) -> StoredItems: ...

    def __getitem__(self, place: int | slice) -> Item | StoredItems:
        if isinstance(place, slice):
            return self.select(self.chosen[place])
        number = int(self.chosen[place])
        table = bisect_right(self.starts, number) - 1
        return self.tables[table].item(number - self.starts[table], self.first_rows[table])

    def __add__(self, others: StoredItems) -> StoredItems:
        chosen = np.concatenate([self.chosen, others.chosen + self.starts[-1]])
        return StoredItems(self.tables + others.tables, self.first_rows + others.first_rows, chosen)

    def select(self, chosen: NDArray[Any]) -> StoredItems:
        """Return the items with these numbers, counted over all tables."""
        return StoredItems(self.tables, self.first_rows, chosen)

    def where(self, kept: NDArray[Any]) -> StoredItems:
        """Return the items for which an array of truth values, one of each, has True."""
        return self.select(self.chosen[kept])

    @property
    def is_examples(self) -> bool:
        """Return whether these are examples of fine-tuning."""
        return any(table.is_examples for table in self.tables)

    @property
    def sources(self) -> NDArray[Any]:
        """Return the number of each item's source, from 0."""
        return np.searchsorted(self.starts, self.chosen, side="right") - 1

    @property
    def rows(self) -> NDArray[Any]:
        """Return the number of each item's row in the run."""
        return self.numbers("row") + np.array(self.first_rows)[self.sources] - 1

    def numbers(self, *names: str) -> NDArray[Any]:
        """Return the sum of columns of numbers, or of the lengths of token ids, by item."""
        columns = [np.concatenate([table.numbers(name) for table in self.tables]) for name in names]
        return np.sum(columns, axis=0)[self.chosen]
