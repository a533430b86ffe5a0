"""Make the items of a run: read sources, leave rows out, tokenise the others; or find all in the cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from rlt_lightning.datamodules.bad_rows import BadRowReport, FilterReason, NumberedRow
from rlt_lightning.datamodules.filters import Row, Sieve
from rlt_lightning.datamodules.items import ItemMaker
from rlt_lightning.datamodules.keys import code_hash, format_settings, hash_of
from rlt_lightning.datamodules.responses import RawResponses
from rlt_lightning.datamodules.rows import with_checked_columns, with_solution
from rlt_lightning.datamodules.sources import Reading, Source
from rlt_lightning.datamodules.stored import MadeItem, batches_of
from rlt_lightning.datamodules.token_cache import TokenCache, Tokenised
from rlt_lightning.datamodules.views import with_other_solutions
from rlt_lightning.models.announce import counted
from rlt_lightning.types import BadRowError, SFTExample


@dataclass
class Preparation:
    """How the rows of some sources become items.

    Args:
        sources: The sources, in order.
        reading: What is read of each.
        raw: How rows with a model's whole response are read.
        maker: Makes the items of one task.
        cache: Where tokenised sources are kept.
        sieve: The filters; None for rows that pass none.
    """

    sources: list[Source]
    reading: Reading
    raw: RawResponses
    maker: ItemMaker
    cache: TokenCache
    sieve: Sieve | None = None
    # Sources that have passed the sieve, which remembers their rows.
    num_sieved: int = field(default=0, init=False)

    def tokenised(self) -> list[Tokenised]:
        """Return the sources' items, with rows that are numbered from one source to the next."""
        found: list[Tokenised] = []
        keys = self.keys() if self.cache.folder else [""] * len(self.sources)
        first_row = 1
        for number, (source, key) in enumerate(zip(self.sources, keys, strict=True)):
            part = self.cache.get(key, str(source), partial(self._batches, number))
            part.report.first_row = first_row
            first_row += part.last_row
            found.append(part)
        return found

    def keys(self) -> list[str]:
        """Return a hash of all that decides the items of each source."""
        maker = vars(self.maker) | {"format": format_settings(self.maker.format)}
        if (views := self.maker.views) is not None:
            maker["views"] = [asdict(views.options), format_settings(views.teacher)]
        settings = {"code": code_hash(), "maker": maker, "raw": asdict(self.raw)}
        if self.sieve is not None and self.sieve.filters.settings():
            settings |= {"filters": self.sieve.settings()}
        keys: list[str] = []
        for source in self.sources:
            # A row may be the duplicate of one in an earlier source.
            earlier = keys[-1:] if self._finds_duplicates else []
            keys.append(hash_of([settings, self.reading.fingerprint(source), earlier]))
        return keys

    # Helpers

    @property
    def _is_examples(self) -> bool:
        return self.maker.task in ("teacher_sft", "student_sft")

    @property
    def _finds_duplicates(self) -> bool:
        return self.sieve is not None and self.sieve.filters.duplicates is not None

    def _batches(self, number: int, made: Tokenised) -> Iterator[Any]:
        """Yield the record batches of a source, and fill in what became of its rows."""
        if self._finds_duplicates:
            for earlier in range(self.num_sieved, number):
                # It was in the cache, so that the sieve has not seen its rows.
                unused = Tokenised(BadRowReport(str(self.sources[earlier]), 0))
                deque(self._items(earlier, unused), maxlen=0)
        yield from batches_of(self._items(number, made), self._is_examples, made.prompts)
        self.num_sieved = number + 1

    def _items(self, number: int, made: Tokenised) -> Iterator[MadeItem]:
        rows = self.raw.rows(self.reading.rows(self.sources[number]), self.maker.format.tags)
        return make_items(tallied(rows, made), made.report, self.maker, self.sieve)


def tallied(rows: Iterable[NumberedRow], made: Tokenised) -> Iterator[NumberedRow]:
    """Yield rows, and note how many there are and the number of the last."""
    for number, columns in rows:
        made.report.num_rows += 1
        made.last_row = number
        yield number, columns


def make_items(
    rows: Iterable[NumberedRow], report: BadRowReport, maker: ItemMaker, sieve: Sieve | None
) -> Iterator[MadeItem]:
    """Make the rows of a source into items, and report the rows that are not used.

    Args:
        rows: Rows as they were read.
        report: Where rows are reported that are bad or left out.
        maker: Makes the items of one task.
        sieve: The filters; None for rows that pass none.

    Raises:
        InputError: If no row has the columns that the task needs.
    """
    if maker.task == "student_rl":
        rows = ((number, with_solution(columns)) for number, columns in rows)
    rows = with_checked_columns(rows, report.source, maker.needed_traces, maker.takes_completions)
    parsed = parsed_rows(rows, report, maker)
    if maker.views is not None and maker.views.options.wrong_solutions:
        parsed = with_other_solutions(parsed)
    if sieve is not None:
        parsed = sieve(parsed, report)
    for number, columns, row in counted(parsed, f"tokenising {report.source}"):
        if sieve is not None and sieve.is_duplicate(row):
            report.filtered.append((number, FilterReason.DUPLICATE, "an earlier row is used"))
            continue
        try:
            items = maker.items_of(number, row, columns)
        except BadRowError as error:
            report.add(number, error)
            continue
        prompt = maker.system_prompt_of(row)
        yield from (MadeItem(item, prompt, columns) for item in items)
        if any(isinstance(item, SFTExample) and item.num_cut for item in items):
            report.truncated.append(number)
        if sieve is not None:
            sieve.remember(row)
    report.sort()


def parsed_rows(rows: Iterable[NumberedRow], report: BadRowReport, maker: ItemMaker) -> Iterator[Row]:
    """Yield the rows that can be parsed, and report the others."""
    for number, columns in rows:
        try:
            if isinstance(columns, BadRowError):
                raise columns
            texts = maker.parsed(columns)
        except BadRowError as error:
            report.add(number, error)
        else:
            yield number, columns, texts
