"""Rows laid out like GPQA's."""

from __future__ import annotations

from pathlib import Path

from rows_of import write

SECRETS = ("zebrafinch", "quokka", "axolotl", "pangolin", "narwhal", "capybara")


def gpqa_like(path: Path, num_rows: int = 3) -> Path:
    question, right, *wrong, extra = SECRETS
    rows = [
        {
            "Record ID": f"rec{i}",
            "Question": f"What is {question} {i}?",
            "Correct Answer": f"{right} {i}",
            **{f"Incorrect Answer {j}": f"{text} {i}" for j, text in enumerate(wrong, 1)},
            "Explanation": extra,
        }
        for i in range(num_rows)
    ]
    return write(path, rows)
