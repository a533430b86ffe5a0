"""Print results as tables, one for each kind of finding, and then what failed or was skipped.

    python report.py results.jsonl [results.jsonl ...]

The kind is what a check's name has before its first comma. If a check was noted more than once, its last line
counts.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

Finding = dict[str, Any]


def cell(value: Any) -> str:
    """Return a figure with three digits; nothing for none."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def report(findings: list[Finding]) -> str:
    """Return all tables."""
    last = {finding["check"]: finding for finding in findings}
    kinds: dict[str, dict[str, Finding]] = defaultdict(dict)
    for name, finding in last.items():
        kind, _, label = name.partition(", ")
        kinds[kind][label] = finding
    parts = []
    for kind, rows in kinds.items():
        figures = dict.fromkeys(
            key
            for finding in rows.values()
            for key, value in finding.items()
            if isinstance(value, int | float) and key != "passed"
        )
        lines = [[kind, *figures], ["---"] * (1 + len(figures))]
        lines += [[label, *(cell(finding.get(key)) for key in figures)] for label, finding in rows.items()]
        parts.append("".join(f"| {' | '.join(line)} |\n" for line in lines))
    wrong = [
        f"* {name}: {finding.get('why', 'failed')}\n" for name, finding in last.items() if is_short(finding)
    ]
    return "\n".join(parts) + "\nFailed or skipped:\n" + ("".join(wrong) or "nothing\n")


def is_short(finding: Finding) -> bool:
    return finding["passed"] is False or "why" in finding


def main() -> None:
    lines = [line for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]
    print(report([json.loads(line) for line in lines]))


if __name__ == "__main__":
    main()
