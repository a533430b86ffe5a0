"""Rows that are appended to a run's JSONL files can be read again, whatever text they hold."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from rlt_lightning.run.jsonl import append_rows, read_whole_rows, rewrite
from rlt_lightning.types import InputError


def test_rows_with_unicode_separators_survive_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    rows = [{"step": step, "text": f"a\u2028b\u2029c\u0085d\x0be {step}"} for step in (1, 2, 3)]
    append_rows(path, rows)
    with open(path, "a") as file:
        file.write('{"step": 4, "te')  # torn by a kill
    assert [row for _, row in read_whole_rows(path)] == rows
    rewrite(path, (line for line, row in read_whole_rows(path) if row["step"] <= 2))
    assert [json.loads(line) for line in path.open()] == rows[:2]


def test_columns_that_json_lacks_are_written_as_text(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    append_rows(path, [{"when": datetime.date(2025, 6, 22), "reward": -1.0}])
    assert json.loads(path.read_text()) == {"when": "2025-06-22", "reward": -1.0}


def test_half_a_surrogate_pair_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    rows = [
        {"k\ud83e": 1, "note": "cut \\\ud83e", "list": [{"\udd14": None}, "whole \U0001f914 é"]},
        {"b": 2**70},
    ]
    append_rows(path, rows)
    assert [row for _, row in read_whole_rows(path)] == rows
    rewrite(path, [line for line, _ in read_whole_rows(path)])
    assert [row for _, row in read_whole_rows(path)] == rows


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    path.write_bytes(b'{"a": 1}\n\x00\x00\x00\n{"a": 2}\n')
    with pytest.raises(InputError, match=r"Every line of .*scores.jsonl must be JSON, but line 2 is not"):
        list(read_whole_rows(path))
