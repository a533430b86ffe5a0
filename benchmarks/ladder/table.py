"""The last step: one JSON and one table of all that the ladder found, OUT/ladder.json and OUT/ladder.md."""

from __future__ import annotations

import json
import sys
from typing import Any

from common import OUT

SHOWN = 5  # figures of a line
NAMES = {True: "passed", False: "**failed**", None: "measured"}


def cell(value: Any) -> str:
    """Return a figure with three digits."""
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "/")


def outcome(finding: dict[str, Any]) -> str:
    """Return whether a check passed, failed, was skipped or only measured."""
    skipped = finding["passed"] is None and "why" in finding
    return "skipped" if skipped else NAMES[finding["passed"]]


def table(findings: list[dict[str, Any]]) -> str:
    """Return the findings as a table."""
    lines = ["| check | outcome | figures |", "|---|---|---|"]
    for finding in findings:
        figures = {k: v for k, v in finding.items() if k not in ("check", "passed", "provenance")}
        simple = {k: v for k, v in figures.items() if not isinstance(v, dict | list)}
        words = ", ".join(f"{key} {cell(value)}" for key, value in list(simple.items())[:SHOWN])
        lines.append(f"| {finding['check'].replace('|', '/')} | {outcome(finding)} | {words} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    findings = [json.loads(line) for line in (OUT / "results.jsonl").read_text().splitlines()]
    counts = {name: sum(outcome(f) == name for f in findings) for name in ("passed", "measured", "skipped")}
    failed = [f["check"] for f in findings if f["passed"] is False]
    (OUT / "ladder.json").write_text(
        json.dumps({"counts": counts, "failed": failed, "checks": findings}, indent=2)
    )
    (OUT / "ladder.md").write_text(table(findings))
    summary = ", ".join(f"{number} {name}" for name, number in counts.items())
    print(f"{OUT / 'ladder.md'}: {summary}, {len(failed)} failed")
    for name in failed:
        print(f"failed: {name}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
