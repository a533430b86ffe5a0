"""The arithmetic problems are right, and give the same rows on every machine."""

from __future__ import annotations

import operator
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import pytest
from arithmetic import KINDS, NAMES, TEMPLATES, THINGS, arithmetic_rows

from rlt_lightning.types import InputError

NUMBER = r"\d+(?:\.\d+)?"
STATEMENT = re.compile(rf"({NUMBER}(?: [-+*/] {NUMBER})+) = ({NUMBER})")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def evaluate(expression: str) -> Fraction:
    """Evaluate a sum of products, independently of the generator."""
    terms, pending = [], operator.add
    for token in ["+", *expression.split(" ")]:
        if token in OPERATORS:
            pending = OPERATORS[token]
        elif pending in (operator.mul, operator.truediv):
            terms[-1] = pending(terms[-1], Fraction(token))
        else:
            terms.append(pending(Fraction(0), Fraction(token)))
    return sum(terms, Fraction(0))


def test_evaluate_knows_precedence():
    assert evaluate("74 - 2 * 6 + 9 / 2") == Fraction(133, 2)


@pytest.mark.parametrize("template", KINDS.values(), ids=lambda template: template.__name__)
def test_every_statement_of_every_trace_is_true(template: Any):
    for seed in range(300):
        question, trace, answer = template(Random(seed))
        statements = STATEMENT.findall(trace)
        assert len(statements) >= 2, trace
        assert trace.count(" = ") == len(statements), trace  # no equation escapes the check
        for expression, result in statements:
            assert evaluate(expression) == Fraction(result), (question, trace)
        assert answer in trace


def test_answers_solve_their_questions():
    for row in arithmetic_rows(600, seed=3):
        question, answer = row["question"], Fraction(row["answer"])
        if found := re.fullmatch(r"Solve (\d+)x \+ (\d+) = (\d+) for x\.", question):
            a, b, c = map(int, found.groups())
            assert a * answer + b == c
        elif found := re.fullmatch(r"Find x if (\d+)x \+ (\d+) = (\d+)x \+ (\d+)\.", question):
            a, b, c, d = map(int, found.groups())
            assert a * answer + b == c * answer + d
        elif found := re.match(r"Add the fractions (\S+) and (\d/\d)\.", question):
            assert Fraction(found[1]) + Fraction(found[2]) == answer
            assert str(answer) == row["answer"]  # reduced
        elif found := re.fullmatch(r"What is (\d+)% of (\d+)\?", question):
            assert Fraction(int(found[1]) * int(found[2]), 100) == answer
        elif found := re.match(
            r"(\w+) is (\d+) years older than (\w+)\. In (\d+) years .* (\d+)\.", question
        ):
            gap, years, total = int(found[2]), int(found[4]), int(found[5])
            assert (answer + years) + (answer + gap + years) == total
        elif found := re.search(r"share (\d+) \w+ in the ratio (\d+) to (\d+)", question):
            whole, a, b = map(int, found.groups())
            assert answer == Fraction(whole * a, a + b)
        elif found := re.search(r"buys (\d+) .* at (\d+) .* and (\d+) .* at (\d+) .* with (\d+)", question):
            n, price, m, other, paid = map(int, found.groups())
            assert n * price + m * other + answer == paid
        elif found := re.search(r"has (\d+) \w+ and gives (\S+) of", question):
            assert int(found[1]) * (1 - Fraction(found[2])) == answer


def test_solutions_end_in_the_boxed_answer():
    for row in arithmetic_rows(200):
        assert row["solution"].endswith(f"\\boxed{{{row['answer']}}}.")


def test_rows_vary():
    assert len(TEMPLATES) >= 10
    assert len({*NAMES, *THINGS}) >= 40
    questions = [row["question"] for row in arithmetic_rows(3000, seed=1)]
    assert len(set(questions)) == 3000
    assert all(any(word in question for question in questions) for word in [*NAMES, *THINGS])


@pytest.mark.full
def test_rows_are_the_same_in_another_process():
    code = "from arithmetic import arithmetic_rows\nprint(arithmetic_rows(50, 7)[49]['question'])"
    other = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
        env={"PYTHONHASHSEED": "12345"},
    ).stdout
    assert other == arithmetic_rows(50, 7)[49]["question"] + "\n"
    assert arithmetic_rows(50, 7) != arithmetic_rows(50, 8)
    assert arithmetic_rows(80, 7)[:50] == arithmetic_rows(50, 7)


def test_splits_share_no_question_even_across_seeds():
    train = {row["question"] for seed in range(3) for row in arithmetic_rows(2000, seed)}
    test = {row["question"] for seed in range(3) for row in arithmetic_rows(500, seed, "test")}
    assert train.isdisjoint(test)


def test_one_kind_can_be_had_alone_even_an_easy_one():
    with_a_digit = re.compile(r"What is (\d+) \+ (\d)\?")
    for row in arithmetic_rows(300, kind="small_sum"):
        found = with_a_digit.fullmatch(row["question"])
        assert found
        assert sum(map(int, found.groups())) == int(row["answer"])
    assert all("What is" in row["question"] for row in arithmetic_rows(50, kind="addition"))
    assert not any(with_a_digit.fullmatch(row["question"]) for row in arithmetic_rows(1000))


def test_impossible_requests_are_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match="splits train and test, but got 'dev'"):
        arithmetic_rows(1, split="dev")
    monkeypatch.setattr("arithmetic.TEMPLATES", (lambda rng: ("q", "t", "1"),))
    with pytest.raises(
        InputError, match=r"about [01] different rows of these settings, but 5 were asked for"
    ):
        arithmetic_rows(5)
