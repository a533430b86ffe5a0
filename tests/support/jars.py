"""A task with questions and solutions, but no traces: how many jars are left on the shelves."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

THINGS = ("jars", "books", "lamps", "plates", "boxes")
PEOPLE = ("Mia", "Tom", "Ada", "Lev", "Noor")


def build_rows(number: int, seed: int = 0) -> list[dict[str, str]]:
    """Return rows with different questions."""
    rng, rows = Random(seed), dict[str, dict[str, str]]()
    while len(rows) < number:
        shelves, each, sold = rng.randint(2, 9), rng.randint(2, 9), rng.randint(1, 9)
        thing, person = rng.choice(THINGS), rng.choice(PEOPLE)
        if (left := shelves * each - sold) < 1:
            continue
        question = (
            f"{person} has {shelves} shelves with {each} {thing} each, and sells {sold} {thing}. "
            f"How many {thing} are left?"
        )
        rows[question] = {"question": question, "solution": f"\\boxed{{{left}}}"}
    return list(rows.values())


def write_rows(path: Path, number: int, seed: int = 0) -> Path:
    """Write rows as a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in build_rows(number, seed)))
    return path
