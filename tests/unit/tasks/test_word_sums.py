"""Word sums: right problems, a classifier that knows its kinds, and splits that share no question."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from trace_kinds import parse_word_sum, word_sum_kind

from rlt_lightning.tasks.stepwise import build_word_sum, word_sum_rows

QUESTION = "Ana has 8 shells, buys 5, finds 3 and gets 4. How many shells does Ana have now?"


def test_question_and_steps_by_hand():
    # 8 + 5 = 13, 13 + 3 = 16, 16 + 4 = 20
    problem = build_word_sum("Ana", "shells", 8, [("buys", 5), ("finds", 3), ("gets", 4)])
    assert problem.question == QUESTION
    assert problem.steps == ["8 + 5 = 13", "13 + 3 = 16", "16 + 4 = 20"]
    assert problem.answer == "20"


def test_questions_are_read_back_into_their_problems():
    for row in word_sum_rows(200, seed=4):
        problem = parse_word_sum(row["question"])
        assert problem.question == row["question"]
        assert problem.answer == row["answer"]
        assert row["solution"] == f"\\boxed{{{row['answer']}}}"


def test_every_right_step_is_a_small_sum():
    for row in word_sum_rows(300, mixture=None):
        assert word_sum_kind(row["question"], row["reasoning_trace"]) == ("steps", 3)
        sums = re.findall(r"(\d+) \+ (\d+) = (\d+)", row["reasoning_trace"])
        assert [int(before) + int(number) for before, number, _ in sums] == [int(after) for *_, after in sums]
        assert all(int(number) <= 5 and int(after) < 25 for _, number, after in sums)


def test_mixture_has_its_proportions():
    # 0.30 filler and 0.20 leaps from the start. The other half breaks off with 0.2 at each of three places:
    # right to the end are 0.5 * 0.8^3 = 0.256. Of the 0.244 that break off, 0.45 turn to filler, 0.30 leap.
    rows = word_sum_rows(4000, seed=5)
    counts = Counter(word_sum_kind(row["question"], row["reasoning_trace"])[0] for row in rows)
    expected = {"steps": 0.256, "filler": 0.410, "leap": 0.273, "wrong": 0.061, "other": 0.0}
    for kind, part in expected.items():
        assert counts[kind] / len(rows) == pytest.approx(part, abs=0.03), kind
