"""Generated problems never change for a seed, since published results refer to them."""

from __future__ import annotations

import hashlib
import json

import pytest
from trace_kinds import parse_word_sum

from rlt_lightning.tasks import EMBEDDED
from rlt_lightning.tasks.draw import Splits, draw_different, find_split
from rlt_lightning.tasks.stepwise import build_word_sum, word_sum_rows
from rlt_lightning.types import InputError

# Recorded before all sources shared one function that draws: source, split, seed, hash of 60 rows.
RECORDED = [
    ("chains", "train", 0, "e4cca974975bfd0d"),
    ("chains", "test", 3, "cb97b82454812d6e"),
    ("chains:right", "train", 0, "282e1179b2316e5c"),
    ("chains:right", "test", 3, "842e87821525bab7"),
    ("countdown", "train", 0, "d9126a0f6eaa5cd9"),
    ("countdown", "test", 3, "4ca3f359192119c0"),
    ("word_sums", "train", 0, "66648096a388a4d3"),
    ("word_sums", "test", 3, "bd934cb041fba959"),
    ("chains", "pretrain", 1, "69a9d205185d7862"),
]


@pytest.mark.parametrize(("source", "split", "seed", "expected"), RECORDED)
def test_a_seed_gives_the_problems_it_always_gave(source: str, split: str, seed: int, expected: str) -> None:
    rows = EMBEDDED[source](60, seed, split)
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == expected


def test_only_new_problems_of_the_split_are_drawn() -> None:
    # "a" and "c" fall into the buckets of one split, and "b" into the other's.
    splits: Splits = {"test": range(8, 12), "train": range(16)}
    assert [find_split(text, splits) for text in "abc"] == ["train", "test", "train"]
    drawn = iter("aabacb")
    found = draw_different("some", lambda: next(drawn), str, 2, "train", splits)
    assert next(found) == "a"
    assert list(drawn) == list("abacb")  # nothing is drawn before it is asked for
    drawn = iter("aabacb")
    assert list(draw_different("some", lambda: next(drawn), str, 2, "train", splits)) == ["a", "c"]


def test_a_source_that_runs_out_says_so() -> None:
    one_split: Splits = {"all": range(16)}
    with pytest.raises(InputError, match=r"some source has about 1 different rows .* but 2 were asked for"):
        list(draw_different("some", lambda: "a", str, 2, "all", one_split))


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
