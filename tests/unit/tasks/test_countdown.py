"""Countdown: the solver misses no solution, two other judges confirm it, rows are the same everywhere."""

from __future__ import annotations

import ast
import json
import operator
import re
from fractions import Fraction
from functools import cache
from itertools import combinations
from random import Random
from typing import Any

import pytest
from cases import GOLDEN_FOLDER

from rlt_lightning.judging.answers import solves_countdown
from rlt_lightning.tasks.countdown import countdown_rows, solve

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


@cache
def all_values(numbers: tuple[Fraction, ...]) -> frozenset[Fraction]:
    """Every value of the numbers, by replacing any two by what an operation makes of them."""
    if len(numbers) == 1:
        return frozenset(numbers)
    found: set[Fraction] = set()
    for i, j in combinations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        made = {a + b, a - b, b - a, a * b} | ({a / b} if b else set()) | ({b / a} if a else set())
        rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
        for value in made:
            found |= all_values(tuple(sorted([*rest, value])))
    return frozenset(found)


@pytest.mark.parametrize(
    "numbers",
    [[7], [0, 4], [3, 5], [2, 2, 9], [0, 0, 5], [8, 3, 8, 3], [1, 3, 4, 6], [97, 11, 50, 7], [0, 5, 5, 1]],
    ids=str,
)
def test_a_target_is_solved_if_and_only_if_another_search_reaches_it(numbers: list[int]):
    reached = all_values(tuple(sorted(map(Fraction, numbers))))
    for target in range(150):
        found = solve(numbers, target)
        assert (found is not None) == (target in reached), target
        if found:
            check(numbers, target, found.text())


def test_fractions_on_the_way_only_where_nothing_else_helps():
    found = solve([8, 3, 8, 3], 24)  # 8 / (3 - 8/3), the only way
    assert found is not None
    assert found.text() == "8 / (3 - 8 / 3)"
    assert found.steps() == ["8 / 3 = 8/3", "3 - (8/3) = 1/3", "8 / (1/3) = 24"]
    for numbers, target in ([6, 2, 3], 9), ([12, 5, 7, 3], 27), ([1, 2, 3, 4], 24):
        whole = solve(numbers, target)
        assert whole is not None
        assert "/" not in "".join(step.split("=")[1] for step in whole.steps())


def test_the_order_of_the_numbers_does_not_matter():
    expressions = {solve(Random(i).sample([3, 25, 50, 7], 4), 82) for i in range(10)}
    assert len(expressions) == 1


def test_every_row_is_confirmed_by_exact_evaluation():
    rows = countdown_rows(60, seed=3) + countdown_rows(5, seed=3, split="test")
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
