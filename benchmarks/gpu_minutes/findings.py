"""How the checks of `make gpu-minutes` write what they find: OUT/results.jsonl, one line of JSON each.

    {"check": NAME, "passed": true | false | null, FIGURES...}

`null` means a measurement, or a check that was skipped for the reason in `why`.

STORE/results.jsonl keeps the lines of earlier calls. A check that it names is not measured again.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

OUT = Path(os.environ.get("OUT", "runs/gpu_minutes"))
STORE = Path(os.environ.get("STORE", "/tmp/gpu_minutes"))
Finding = tuple[bool | None, dict[str, Any]]


def note(check: str, passed: bool | None = None, **fields: Any) -> None:
    """Print a finding, and append it to the results of this call and of all calls."""
    line = json.dumps({"check": check, "passed": passed} | fields)
    print(line, flush=True)
    for folder in (OUT, STORE):
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "results.jsonl", "a") as file:
            file.write(line + "\n")


def read_findings(*files: Path) -> list[dict[str, Any]]:
    """Return the lines of files of results; a line that a kill cut short is left out."""
    findings = []
    for file in files:
        # A shell's message may be cut within a character.
        for line in file.read_text(errors="replace").splitlines():
            try:
                findings.append(json.loads(line))
            except json.JSONDecodeError:
                print(f"{file}: a line is cut short: {line[:80]}", file=sys.stderr)
    return findings


def measured_before() -> set[str]:
    """Return the names of checks that an earlier call measured, or found wrong."""
    file = STORE / "results.jsonl"
    findings = read_findings(file) if file.exists() else []
    return {f["check"] for f in findings if not str(f.get("why", "")).startswith("skipped: no time left")}
