"""Scored data: two traces of a row, a warning of foreign traces, kills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import rlt

ROWS = [
    {
        "question": f"What is {n} + {n}?",
        "solution": str(2 * n),
        "reasoning_trace": f"{n} and {n}: {2 * n}.",
        "id": n,
    }
    for n in range(1, 10)
]


def command(config: str, model: str, source: Path, folder: Path, *options: str) -> list[str]:
    models = [f"--model.teacher={model}", f"--model.student={model}"]
    where = [f"--data.source={source}", f"--output_dir={folder}"]
    return ["predict", f"--config=recipe_7b/{config}", *models, *where, *options]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open()]


def test_scoring_goes_on_after_the_last_whole_row(tiny_model: str, source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    whole = command("score", tiny_model, source, folder, "--data.prompts_per_step=1")
    assert rlt(*whole).returncode == 0
    scores = folder / "scores.jsonl"
    before = scores.read_text()
    lines = before.splitlines(keepends=True)
    scores.write_text("".join(lines[:4]) + lines[4][:20])
    result = rlt(*whole, "--resume=true")
    assert result.returncode == 0, result.stderr
    assert " 5/5 [" in result.stdout  # what is missing, and no more
    assert scores.read_text() == before


@pytest.mark.full
def test_scores_of_other_rows_or_settings_are_not_gone_on_with(
    tiny_model: str, source: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    whole = command("score", tiny_model, source, folder)
    assert rlt(*whole).returncode == 0
    before = (folder / "scores.jsonl").read_bytes()
    texts = rlt(*whole, "--resume=true", "--distillation.per_token=true")
    assert "distillation.per_token was False and is True" in texts.stderr
    for rows in ([{**ROWS[0], "solution": "7"}, *ROWS[1:]], ROWS[:-1]):
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        result = rlt(*whole, "--resume=true")
        [line] = result.stderr.strip().splitlines()
        assert result.returncode == 2
        assert "has rows of other problems. Restore data.source" in line
    assert (folder / "scores.jsonl").read_bytes() == before
