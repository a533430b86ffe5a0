"""Countdown problems, to make a target from all given numbers, drawn from a seed with a solution of each."""

from __future__ import annotations

from random import Random
from typing import Any

from rlt_lightning.tasks.draw import draw_different
from rlt_lightning.types import BadRowError, BadRowReason


def countdown_rows(num_rows: int, seed: int = 0, split: str = "train") -> list[dict[str, Any]]:
    """Make different solved problems of 3 or 4 numbers below 100; the same arguments give the same rows.

    Args:
        num_rows: Number of rows.
        seed: Seed of the problems.
        split: "train" or "test"; a problem is in the same split whatever the seed and the order of its
            numbers.

    Returns:
        The rows of `draw_row`.

    Raises:
        InputError: If there is no such split, or there are fewer different problems.
    """
    random = Random(f"countdown {seed} {split}")
    return list(draw_different("countdown", lambda: draw_row(random), name_problem, num_rows, split))


def name_problem(row: dict[str, Any]) -> str:
    """Return a text that is the same for the same numbers in another order."""
    return f"{sorted(row['numbers'])} {row['target']}"


def draw_row(random: Random) -> dict[str, Any]:
    """Draw 3 or 4 numbers from 1 to 99, and a target from 10 to 99 that operations in a row make of them.

    No value on the way is negative or a fraction.

    Returns:
        Columns `question`, `solution` (the steps, then `\\boxed{EXPRESSION}.`), `answer` (the expression),
        `numbers`, `target` and `kind` ("countdown").
    """
    value = -1
    while not 10 <= value <= 99:
        value = random.randint(1, 99)
        numbers, steps, expression, is_sum = [value], list[str](), str(value), False
        for _ in range(random.choice((2, 3))):
            operator = random.choice("+-*/")
            divisors = [number for number in range(2, 100) if value % number == 0]
            operator = "-" if operator == "/" and not divisors else operator
            numbers.append(number := random.choice(divisors) if operator == "/" else random.randint(1, 99))
            results = {"+": value + number, "-": value - number, "*": value * number, "/": value // number}
            steps.append(f"{value} {operator} {number} = {results[operator]}")
            value = results[operator]
            if value < 0:
                break
            left = f"({expression})" if is_sum and operator in "*/" else expression
            expression, is_sum = f"{left} {operator} {number}", operator in "+-"
    random.shuffle(numbers)
    shown = f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
    return {
        "question": (
            f"Make {value} from the numbers {shown}. Use each of the numbers exactly once, with +, -, *, / "
            "and parentheses. Write the expression, without an equals sign, in \\boxed{}."
        ),
        "solution": f"{'; '.join(steps)}. The expression is \\boxed{{{expression}}}.",
        "answer": expression,
        "numbers": numbers,
        "target": value,
        "kind": "countdown",
    }


def require_counts(numbers: Any, target: Any) -> None:
    """Check that numbers and target are integers, none below 0.

    Raises:
        BadRowError: If they are not.
    """
    if not isinstance(numbers, list) or not all(map(_is_count, [*numbers, target])):
        detail = f"numbers and target must be integers, none below 0, but are {numbers} and {target}"
        raise BadRowError(BadRowReason.WRONG_TYPE, detail)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
