"""A user's rows are split by their questions, and results are tabulated with their costs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import rows_of
from jars import build_rows, write_rows
from own_rows import build_page, choose_part, is_told_apart, main, repeat_rows, split_rows

from rlt_lightning.types import InputError


def test_a_part_depends_on_the_question_only() -> None:
    questions = [f"What is {n} plus {n * n}?" for n in range(5000)]
    counts = Counter(map(choose_part, questions))
    # Of 5,000 draws with p 0.1 the standard deviation is sqrt(5000 * 0.1 * 0.9) = 21.
    assert abs(counts["test"] - 500) < 100
    assert abs(counts["validation"] - 500) < 100
    assert counts["train"] == 5000 - counts["test"] - counts["validation"]
    for question in questions[:200]:
        assert choose_part(f"  {question.upper()}\n") == choose_part(question)
    # Python's own hash differs by process; these must hold for ever, or a second run trains on test rows.
    parts = [choose_part(f"question {n}") for n in range(16)]
    assert [n for n, part in enumerate(parts) if part == "test"] == [7, 13]
    assert [n for n, part in enumerate(parts) if part == "validation"] == [10]


def test_parts_share_no_question_and_later_rows_move_none(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 200)
    counts = split_rows(str(rows), tmp_path / "first")
    parts = {part: rows_of.read(tmp_path / "first" / f"{part}.jsonl") for part in counts}
    assert {part: len(found) for part, found in parts.items()} == counts
    assert sum(counts.values()) == 200
    written = [row for found in parts.values() for row in found]
    assert sorted(map(str, written)) == sorted(map(str, build_rows(200)))  # columns stay
    split_rows(str(write_rows(tmp_path / "more.jsonl", 300)), tmp_path / "second")
    for part, found in parts.items():
        more = rows_of.read(tmp_path / "second" / f"{part}.jsonl")
        assert [row for row in more if row in found] == found
    assert split_rows(str(rows), tmp_path / "first") == counts  # again: a resumed script
    with pytest.raises(InputError, match="Choose another folder"):
        split_rows(str(tmp_path / "more.jsonl"), tmp_path / "first")


def test_test_rows_need_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row | {"solution": "It is so."} for row in build_rows(100)]
    source = rows_of.write_rows(tmp_path / "rows.jsonl", rows)
    assert main(["split", source, str(tmp_path / "parts")]) == 2
    assert "Test rows need an answer" in capsys.readouterr().err
    assert not (tmp_path / "parts").exists()
    rows_of.write_rows(tmp_path / "rows.jsonl", [*(row | {"answer": "7"} for row in rows[:50]), *rows[50:]])
    assert main(["split", source, str(tmp_path / "parts")]) == 0
    assert {row["answer"] for row in rows_of.read(tmp_path / "parts/test.jsonl")} == {"7"}
    assert "test rows are left out: they have no answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("way", "chosen"),
    [
        ("first", [(2, 0), (3, 0), (4, 0), (5, 0)]),
        ("best", [(1, 1), (2, 0), (3, 1), (4, 1), (5, 0)]),
        ("quarter", [(4, 1)]),  # one of five
    ],
)
def test_rungs_choose_from_the_same_traces(way: str, chosen: list[tuple[int, int]], tmp_path: Path) -> None:
    # Two traces of each row; one that earns -10 does not fit a student.
    rewards = [(-10.0, -1.0), (0.5, 0.4), (-0.2, 0.3), (0.1, 0.9), (0.2, -10.0), (-10.0, -10.0)]
    traces = [
        {"row": row, "trace": number, "fits": reward > -9, "reward": reward}
        for row, values in enumerate(rewards, start=1)
        for number, reward in enumerate(values)
    ]
    source = rows_of.write_rows(tmp_path / "traces.jsonl", traces)
    like, output = tmp_path / "train.jsonl", tmp_path / "chosen/student.jsonl"
    like.write_text("{}\n" * 6)
    assert main(["choose", way, source, str(output), str(like)]) == 0
    rows = [(int(row["row"]), int(row["trace"])) for row in rows_of.read(output)]
    # As many steps as from 6 rows, nearly: 6 / 4 and 6 / 5 are rounded, 6 / 1 is whole.
    assert rows == chosen * {"first": 2, "best": 1, "quarter": 6}[way]


def test_few_rows_are_repeated_sixteen_times_at_most() -> None:
    assert repeat_rows([{"row": 1}], 1000) == [{"row": 1}] * 16
    assert repeat_rows([], 1000) == []
    assert len(repeat_rows([{}] * 40, 30)) == 40


def test_six_to_none_are_told_apart_and_five_not() -> None:
    # Two sides of six fair coins: 2 / 64 = 0.031; of five 2 / 32 = 0.0625. Rows that agree say nothing.
    def rates(number: int) -> dict[str, float]:
        return {str(row): float(row < number) for row in range(20)}

    assert is_told_apart(rates(18), rates(12))
    assert is_told_apart(rates(12), rates(18))
    assert not is_told_apart(rates(18), rates(13))
    assert not is_told_apart(rates(18), rates(18))


def write_evaluation(run: Path, name: str, number: int) -> None:
    """Write what `rlt test` leaves if the first rows of 20 are right."""
    folder = run / f"evaluate_{name}"
    folder.mkdir(parents=True)
    (folder / "evaluation.json").write_text("{}")
    rows = [{"id": f"test/{row}", "correct": row < number, "num_tokens": 3} for row in range(20)]
    rows_of.write_rows(folder / "responses.jsonl", rows)


def test_a_rung_pays_for_each_stage_it_needs(tmp_path: Path) -> None:
    for stage, number in {"explain": 8, "traces": 8, "traces_control": 2, "own": 8}.items():
        (tmp_path / stage).mkdir()
        (tmp_path / stage / "traces.jsonl").write_text('{"num_tokens": 10}\n' * number)
    columns = "step,perf/generate_tokens_per_s,perf/generate_s,perf/train_tokens_per_s,perf/train_s\n"
    for stage in ("warmup", "student_control", "student_best_of_4", "rlt"):
        (tmp_path / stage).mkdir()
        (tmp_path / stage / "metrics.csv").write_text(f"{columns}1,,,50,4.0\n2,,,5,1.0\n")
    (tmp_path / "rlt/metrics.csv").write_text(f"{columns}1,100,2.0,50,4.0\n2,10,1.0,5,1.0\n")
    (tmp_path / "rlt/rollouts.jsonl").write_text("{}\n" * 3)
    (tmp_path / "rlt/large").write_bytes(bytes(2**20) * 21)  # 0.0205 GiB
    names = ["own", "explain", "warmup", "traces_control", "student_control", "traces"]
    names += ["student_best_of_4", "rlt"]
    (tmp_path / "seconds.tsv").write_text("".join(f"{name}\t0\n{name}\t3600\n" for name in names))
    for name, number in {"base": 4, "control": 12, "best_of_4": 13, "rlt": 18}.items():
        write_evaluation(tmp_path, f"{name}_greedy", number)
    write_evaluation(tmp_path, "base_sampled", 5)
    page = build_page(tmp_path).splitlines()
    costs = [line.split("|")[1:-1] for line in page if line.startswith("|")]
    cells = {line[0].strip(): [cell.strip() for cell in line[1:]] for line in costs}
    # Warm-up and student train 50 * 4 + 5 * 1 tokens each; stage 0 and the warm-up belong to all three.
    assert cells["greedy traces of the warm-up teacher"][1:6] == ["10", "100", "410", "4.00", "0.00"]
    assert cells["the best of 4 of these"][1:6] == ["16", "160", "410", "4.00", "0.00"]
    assert cells["the RLT teacher's traces at T 0.7"][1:6] == ["11", "290", "410", "3.00", "0.02"]
    rates = ["20.0 (8 to 42)", "25.0 (11 to 47)"]
    assert cells["nothing: the base"] == ["", "0", "0", "0", "0.00", "0.00", *rates]
    assert cells["all"] == ["29", "470", "820", "8.00", "0.02"]
    # Of the best's 18 rows the best of 4 lacks 5, which may be chance, and the control 6.
    assert "**the best of 4 of these (65.0 %)**" in page[-3]
    assert "The best is the RLT teacher's traces at T 0.7 (90.0 %)" in page[-3]
    assert "**nothing: the base (25.0 %)**" in page[-1]
