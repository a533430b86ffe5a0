"""Count and report the rows that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlt_lightning.types import BadRowError, InputError

SHOWN_ROWS = 5  # row numbers per reason in messages


# A row's number, from 1, and its columns, or the reason why it has none.
NumberedRow = tuple[int, "dict[str, Any] | BadRowError"]


@dataclass
class BadRowReport:
    """The rows of one source that are not used, by number and reason."""

    source: str
    num_rows: int = 0
    first_row: int = 1  # number of this source's row 1 in a run that reads several sources
    bad: list[tuple[int, BadRowError]] = field(default_factory=list)
    truncated: list[int] = field(default_factory=list)  # rows that are used without their end

    @property
    def frac(self) -> float:
        """Return the part of the rows that cannot be used."""
        return len(self.bad) / max(1, self.num_rows)

    def rows_by_reason(self) -> dict[str, list[int]]:
        """Return row numbers by reason, the most frequent reason first."""
        return group_rows((row, str(error.reason)) for row, error in self.bad)

    def summary(self) -> str:
        """Return counts by reason and the first row numbers, in one line."""
        what = f"{len(self.bad)} of {self.num_rows} rows of '{self.source}' cannot be used"
        return what + list_reasons(self.rows_by_reason())

    def lines(self) -> list[str]:
        """Return a line each about unusable and truncated rows, where there are any."""
        lines = [self.summary()] if self.bad else []
        if self.truncated:
            lines.append(
                f"{len(self.truncated)} of {self.num_rows} rows of '{self.source}' are cut off at "
                f"data.max_length ({list_rows(self.truncated)})"
            )
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Return counts, and every bad row with its reason and detail."""
        return {
            "source": self.source,
            "first_row": self.first_row,
            "num_rows": self.num_rows,
            "num_used": self.num_rows - len(self.bad),
            "num_bad": len(self.bad),
            "num_truncated": len(self.truncated),
            "reasons": {reason: len(rows) for reason, rows in self.rows_by_reason().items()},
            "bad_rows": [
                {"row": row, "reason": str(error.reason), "detail": error.detail} for row, error in self.bad
            ],
            "truncated_rows": self.truncated,
        }

    def check(self, max_bad_frac: float, report_path: Path | None) -> None:
        """Stop if more than `max_bad_frac` of the rows, or all of them, cannot be used.

        Raises:
            InputError: With the reasons and the first row numbers.
        """
        if self.frac <= max_bad_frac and len(self.bad) < self.num_rows:
            return
        row, error = self.bad[0]
        where = f" All of them are listed in {report_path}." if report_path else ""
        must = f"At most data.max_bad_frac={max_bad_frac:g} of the rows may be unusable"
        if len(self.bad) == self.num_rows:
            must = "At least one row must be usable"
        raise InputError(
            f"{must}, but {self.summary()}. Row {row}: {error.detail}.{where} Correct these "
            "rows, raise data.max_bad_frac or the limits of length."
        )


def group_rows(rows: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Return row numbers by reason, the most frequent reason first."""
    groups: dict[str, list[int]] = {}
    for row, reason in sorted(rows):
        groups.setdefault(reason, []).append(row)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def list_reasons(rows: dict[str, list[int]]) -> str:
    """Return the end of a line: each reason with its count and the first row numbers."""
    reasons = [f"{reason} {len(numbers)} ({list_rows(numbers)})" for reason, numbers in rows.items()]
    return f": {', '.join(reasons)}" if reasons else ""


def list_rows(rows: list[int]) -> str:
    """Name the first few rows, for a message."""
    shown = ", ".join(map(str, rows[:SHOWN_ROWS])) + (", …" if len(rows) > SHOWN_ROWS else "")
    return f"row{'s' if len(rows) > 1 else ''} {shown}"


def write_reports(path: Path, reports: list[BadRowReport]) -> None:
    """Write the reports of a run's sources to one JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"sources": [report.as_dict() for report in reports]}, indent=1) + "\n")
