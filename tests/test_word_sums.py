"""Word sums: right problems, a classifier that knows its kinds, and splits that share no question."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from rlt_lightning.datamodules import word_sums
from rlt_lightning.datamodules.rows import EMBEDDED
from rlt_lightning.datamodules.word_sums import (
    HIGHEST,
    LOWEST,
    word_sum,
    word_sum_kind,
    word_sum_of,
    word_sum_rows,
)
from rlt_lightning.types import InputError

QUESTION = "Ana has 12 shells, buys 5, gives away 3 and finds 7. How many shells does Ana have now?"


def test_question_and_steps_by_hand():
    # 12 + 5 = 17, 17 - 3 = 14, 14 + 7 = 21
    problem = word_sum("Ana", "shells", 12, [("buys", 5), ("gives away", 3), ("finds", 7)])
    assert problem.question == QUESTION
    assert problem.steps == ["12 + 5 = 17", "17 - 3 = 14", "14 + 7 = 21"]
    assert problem.answer == "21"


@pytest.mark.parametrize(
    ("trace", "kind", "num_right"),
    [
        ("12 + 5 = 17. 17 - 3 = 14. 14 + 7 = 21.", "steps", 3),
        ("\n12 + 5 = 17. 17 - 3 = 14. 14 + 7 = 21\n", "steps", 3),
        ("12 + 5 = 17. 17 - 3 = 15. 15 + 7 = 22.", "wrong", 1),
        ("12 + 5 = 170. 17 - 3 = 14. 14 + 7 = 21.", "wrong", 0),
        ("It is easy to see that the answer is 21.", "leap", 0),
        ("12 + 5 = 17. Clearly the answer must be 20.", "leap", 1),
        ("12 + 5 = 17. This is not hard. Then we do what it says.", "filler", 1),
        ("This is not hard.", "filler", 0),
        ("12 + 5 = 17.", "other", 1),
        ("12 + 5 = 17. 17 - 3 = 14. 14 + 7 = 21. This is not hard.", "other", 3),
        ("", "other", 0),
        ("Ana buys shells.", "other", 0),
    ],
)
def test_kinds_by_hand(trace: str, kind: str, num_right: int):
    assert word_sum_kind(QUESTION, trace) == (kind, num_right)


def test_questions_are_read_back_into_their_problems():
    for row in word_sum_rows(200, seed=4):
        problem = word_sum_of(row["question"])
        assert problem.question == row["question"]
        assert problem.answer == row["answer"]
        assert row["solution"] == f"\\boxed{{{row['answer']}}}"


def test_every_right_step_is_a_small_sum():
    for row in word_sum_rows(300, mixture=None):
        assert word_sum_kind(row["question"], row["reasoning_trace"]) == ("steps", 3)
        for before, sign, number, after in re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", row["reasoning_trace"]):
            assert int(before) + (int(number) if sign == "+" else -int(number)) == int(after)
            assert 2 <= int(number) <= 9
            assert LOWEST <= int(after) <= HIGHEST


def test_mixture_has_its_proportions():
    # 0.35 filler and 0.20 leaps at the start, by a hazard of 0.3 at each of three places: right to the end
    # 0.45 * 0.7^3 = 0.154; of the 0.296 that break off, 0.45 turn to filler and 0.30 leap.
    rows = word_sum_rows(4000, seed=5)
    counts = Counter(word_sum_kind(row["question"], row["reasoning_trace"])[0] for row in rows)
    expected = {"steps": 0.154, "filler": 0.483, "leap": 0.289, "wrong": 0.074, "other": 0.0}
    for kind, part in expected.items():
        assert counts[kind] / len(rows) == pytest.approx(part, abs=0.03), kind


def test_splits_share_no_question():
    train = {row["question"] for seed in range(3) for row in word_sum_rows(500, seed, "train")}
    test = {row["question"] for seed in range(3) for row in word_sum_rows(500, seed, "test")}
    assert not train & test


def test_quality_of_traces_changes_no_problem():
    uneven, right = word_sum_rows(50, seed=6), EMBEDDED["word_sums:right"](50, 6, "train")
    assert [row["question"] for row in uneven] == [row["question"] for row in right]
    assert EMBEDDED["word_sums"](50, 6, "train") == uneven
    assert set(uneven[0]) == {"question", "solution", "reasoning_trace", "answer"}  # and no kind


def test_other_splits_are_refused():
    with pytest.raises(InputError, match="splits train and test"):
        word_sum_rows(1, split="dev")


def test_more_rows_than_problems_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(word_sums, "NAMES", ("Ana",))
    monkeypatch.setattr(word_sums, "MAX_REPEATS", 0)  # the first question that comes twice ends it
    with pytest.raises(InputError, match="different rows of 2 steps"):
        word_sum_rows(20_000, length=2)
