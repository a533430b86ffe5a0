"""Countdown: two other judges confirm the solutions, and judge alike; rows are the same everywhere."""

from __future__ import annotations

import ast
import json
import operator
import re
from fractions import Fraction
from typing import Any

import pytest
from cases import GOLDEN_FOLDER

from rlt_lightning.judging.answers import solves_countdown
from rlt_lightning.tasks.countdown import countdown_rows

OPERATORS: dict[type[ast.operator], Any] = {ast.Add: operator.add, ast.Sub: operator.sub}
OPERATORS |= {ast.Mult: operator.mul, ast.Div: operator.truediv}


def evaluate(node: ast.AST) -> tuple[Fraction, list[int]]:
    """The exact value of a parsed expression, and the numbers that it uses."""
    if isinstance(node, ast.Constant):
        return Fraction(node.value), [node.value]
    assert isinstance(node, ast.BinOp)
    (left, some), (right, others) = evaluate(node.left), evaluate(node.right)
    return OPERATORS[type(node.op)](left, right), some + others


def check(numbers: list[int], target: int, expression: str) -> None:
    value, used = evaluate(ast.parse(expression, mode="eval").body)
    assert value == target, expression
    assert sorted(used) == sorted(numbers), expression


def test_every_row_is_confirmed_by_exact_evaluation():
    rows = countdown_rows(400, seed=3) + countdown_rows(5, seed=3, split="test")
    assert {len(row["numbers"]) for row in rows} == {3, 4}
    for row in rows:
        numbers, target, answer = row["numbers"], row["target"], row["answer"]
        check(numbers, target, answer)
        assert row["solution"].endswith(f" The expression is \\boxed{{{answer}}}.")
        steps = row["solution"].split(". The expression")[0].split("; ")
        assert len(steps) == len(numbers) - 1
        for step in steps:
            left, right = step.split(" = ")
            assert evaluate(ast.parse(left, mode="eval").body)[0] == Fraction(right)
        assert Fraction(right) == target
        shown = [int(n) for n in re.findall(r"\d+", row["question"])]
        assert shown == [target, *numbers]


def test_expressions_are_judged_as_reasoning_gym_judges_them():
    # Its full score or not, by version 0.1.25: expression, numbers, target, verdict.
    lines = (GOLDEN_FOLDER / "countdown_verdicts.jsonl").read_text().splitlines()
    for expression, numbers, target, verdict in map(json.loads, lines):
        assert solves_countdown(expression, numbers, target) == verdict, expression


@pytest.mark.parametrize("text", ["(" * 120, "-" * 199 + "1", "(" * 99 + "1" + ")" * 99, "1/" * 99 + "1"])
def test_long_expressions_end_without_an_error(text: str):
    assert not solves_countdown(text, [2], 2)
