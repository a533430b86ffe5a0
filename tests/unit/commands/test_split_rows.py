"""A user's rows are split by their questions, and results are tabulated with their costs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from jars import build_rows, write_rows
from own_rows import (
    build_page,
    choose_part,
    main,
    split_rows,
)

from rlt_lightning.types import InputError


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_part_depends_on_the_question_only() -> None:
    questions = [f"What is {n} plus {n * n}?" for n in range(5000)]
    counts = Counter(map(choose_part, questions))
    # Of 5,000 draws with p 0.1 the standard deviation is sqrt(5000 * 0.1 * 0.9) = 21.
    assert abs(counts["test"] - 500) < 100
    assert abs(counts["held_out"] - 500) < 100
    assert counts["train"] == 5000 - counts["test"] - counts["held_out"]
    for question in questions[:200]:
        assert choose_part(f"  {question.upper()}\n") == choose_part(question)
    # Python's own hash differs by process; these must hold for ever, or a second run trains on test rows.
    parts = [choose_part(f"question {n}") for n in range(16)]
    assert [n for n, part in enumerate(parts) if part == "test"] == [7, 13]
    assert [n for n, part in enumerate(parts) if part == "held_out"] == [10]


def test_parts_share_no_question_and_later_rows_move_none(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 200)
    counts = split_rows(str(rows), tmp_path / "first")
    parts = {part: read(tmp_path / "first" / f"{part}.jsonl") for part in counts}
    assert {part: len(found) for part, found in parts.items()} == counts
    assert sum(counts.values()) == 200
    written = [row for found in parts.values() for row in found]
    assert sorted(map(str, written)) == sorted(map(str, build_rows(200)))  # columns stay
    split_rows(str(write_rows(tmp_path / "more.jsonl", 300)), tmp_path / "second")
    for part, found in parts.items():
        more = read(tmp_path / "second" / f"{part}.jsonl")
        assert [row for row in more if row in found] == found
    assert split_rows(str(rows), tmp_path / "first") == counts  # again: a resumed script
    with pytest.raises(InputError, match="Choose another folder"):
        split_rows(str(tmp_path / "more.jsonl"), tmp_path / "first")


def test_test_rows_need_an_answer_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row | {"solution": "It is so."} for row in build_rows(100)]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["split", str(source), str(tmp_path / "parts")]) == 2
    assert "Test rows need an answer" in capsys.readouterr().err
    assert not (tmp_path / "parts").exists()
    source.write_text("".join(json.dumps(row | {"answer": "7"}) + "\n" for row in rows[:50]))
    with source.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows[50:])
    assert main(["split", str(source), str(tmp_path / "parts")]) == 0
    assert {row["answer"] for row in read(tmp_path / "parts/test.jsonl")} == {"7"}
    assert "test rows are left out: they have no answer" in capsys.readouterr().err


def test_the_page_adds_up_what_stages_cost(tmp_path: Path) -> None:
    for name in ("base_greedy", "base_sampled", "best_of_4_greedy"):
        folder = tmp_path / f"evaluate_{name}"
        folder.mkdir()
        result = {"pass_at_1": 0.5, "num_problems": 100.0}
        (folder / "evaluation.json").write_text(json.dumps({"sets": {"test": result}}))
    (tmp_path / "traces_best_of_4").mkdir()
    (tmp_path / "traces_best_of_4/traces.jsonl").write_text('{"num_tokens": 0}\n' * 8)
    (tmp_path / "traces_best_of_4/distillation.jsonl").write_text("{}\n" * 2)
    (tmp_path / "evaluate_base_greedy/responses.jsonl").write_text('{"num_tokens": 7}\n{"num_tokens": 5}\n')
    (tmp_path / "rlt").mkdir()
    columns = "step,perf/generate_tokens_per_s,perf/generate_s,perf/train_tokens_per_s,perf/train_s\n"
    (tmp_path / "rlt/metrics.csv").write_text(f"{columns}1,100,2.0,50,4.0\n2,10,1.0,5,1.0\n")
    (tmp_path / "rlt/rollouts.jsonl").write_text("{}\n" * 3)
    (tmp_path / "seconds.tsv").write_text("rlt\t50\nrlt\t70\nevaluate_base_greedy\t60\n")
    page = build_page(tmp_path, num_cards=2)
    assert "| nothing: the base |  |  | 50.0 (40 to 60) | 50.0 (40 to 60) |" in page
    assert "| the best of 4 of these | 8 | 2 | 50.0 (40 to 60) |  |" in page
    assert "| the RLT teacher's at T 0.7 | 3 |  |  |  |" in page
    # Sampled 100 * 2 + 10 * 1, trained 50 * 4 + 5 * 1; 50 + 70 s on 2 cards are 4 card-minutes.
    assert "| rlt | 210 | 205 | 120 | 4.0 |" in page
    assert "| evaluate_base_greedy | 12 | 0 | 60 | 2.0 |" in page
    assert "| all | 222 | 205 | 180 | 6.0 |" in page
    assert "| all | 222 | 205 | 180 | none |" in build_page(tmp_path, num_cards=0)
