"""Read and write the rows of a JSONL file, and make a row of Bespoke-Stratos' kind."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open()]


def write(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    """Write rows, and return the path as a setting has it."""
    return str(write(path, rows))


def stratos_turn(thought: str, solution: str) -> str:
    """An answer in the tags of Bespoke-Stratos."""
    return (
        f"<|begin_of_thought|>\n\n{thought}\n\n<|end_of_thought|>\n\n"
        f"<|begin_of_solution|>\n\n{solution}\n\n<|end_of_solution|>"
    )


def stratos_row(question: str, thought: str, solution: str, system: str) -> dict[str, Any]:
    """A row in the columns of Bespoke-Stratos."""
    turns = [
        {"from": "user", "value": question},
        {"from": "assistant", "value": stratos_turn(thought, solution)},
    ]
    return {"system": system, "conversations": turns}
