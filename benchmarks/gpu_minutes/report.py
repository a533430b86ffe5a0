"""Print results as tables, one for each kind of finding (its name up to a comma), and what failed.

    python report.py results.jsonl [results.jsonl ...]

If a check was noted more than once, its last line counts.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any


def cell(value: Any) -> str:
    """Return a figure with three digits; nothing for none."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def table(kind: str, rows: list[dict[str, Any]]) -> str:
    """Return the figures of findings of one kind."""
    numbers = [{k: v for k, v in row.items() if isinstance(v, int | float) and k != "passed"} for row in rows]
    names = list(dict.fromkeys(name for row in numbers for name in row))
    lines = [[kind, *names], ["---"] * (1 + len(names))]
    for row, figures in zip(rows, numbers, strict=True):
        lines.append([row["check"].partition(", ")[2], *(cell(figures.get(name)) for name in names)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    findings = [json.loads(line) for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]
    last = sorted(
        {row["check"]: row for row in findings}.values(), key=lambda row: row["check"].partition(",")[0]
    )
    for kind, rows in groupby(last, key=lambda row: row["check"].partition(",")[0]):
        print(table(kind, list(rows)))
    short = [row for row in last if row["passed"] is False or "why" in row]
    print("Failed or skipped:", *(f"* {row['check']}: {row.get('why', 'failed')}" for row in short), sep="\n")


if __name__ == "__main__":
    main()
