"""Make the items of a source from the rows that are usable and that no filter leaves out."""

from __future__ import annotations

from collections.abc import Iterator

from rlt_lightning.datamodules.bad_rows import BadRowError, BadRowReport, FilterReason, NumberedRow
from rlt_lightning.datamodules.filters import Row, Sieve
from rlt_lightning.datamodules.items import Item, ItemMaker
from rlt_lightning.datamodules.rows import check_columns, with_solution
from rlt_lightning.models.announce import counted
from rlt_lightning.types import SFTExample


def make_items(
    rows: list[NumberedRow], report: BadRowReport, maker: ItemMaker, sieve: Sieve | None
) -> list[Item]:
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
        rows = [(number, with_solution(columns)) for number, columns in rows]
    check_columns(rows, report.source, maker.needed_traces, maker.takes_completions)
    parsed = list(parsed_rows(rows, report, maker))
    if sieve is not None:
        parsed = sieve(parsed, report)
    items: list[Item] = []
    for number, columns, row in counted(parsed, f"tokenising {report.source}"):
        if sieve is not None and sieve.is_duplicate(row):
            report.filtered.append((number, FilterReason.DUPLICATE, "an earlier row is used"))
            continue
        try:
            made = maker.items_of(report.first_row - 1 + number, row, columns)
        except BadRowError as error:
            report.add(number, error)
            continue
        items += made
        maker.system_prompts[report.first_row - 1 + number] = maker.system_prompt_of(row)
        if any(isinstance(item, SFTExample) and item.num_cut for item in made):
            report.truncated.append(number)
        if sieve is not None:
            sieve.remember(row)
    report.sort()
    return items


def parsed_rows(rows: list[NumberedRow], report: BadRowReport, maker: ItemMaker) -> Iterator[Row]:
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
