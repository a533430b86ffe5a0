"""Countdown problems (make a target from all given numbers), generated from a seed, and an exact solver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from random import Random
from typing import Any, NamedTuple

from rlt_lightning.tasks.draw import draw_different
from rlt_lightning.types import BadRowError, BadRowReason

PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "": 3}
MAX_NUMBERS = 4  # of a problem: all values that they make are in one table

Numbers = tuple[int, ...]  # sorted
Value = int | Fraction  # exact; never a Fraction that is an integer


def countdown_rows(num_rows: int, seed: int = 0, split: str = "train") -> list[dict[str, Any]]:
    """Make different solved problems of 3 or 4 numbers below 100; the same arguments give the same rows.

    Args:
        num_rows: Number of rows.
        seed: Seed of the problems.
        split: "train" or "test"; a problem is in the same split whatever the seed and the order of its
            numbers.

    Returns:
        The rows of `countdown_row`.

    Raises:
        InputError: If there is no such split, or there are fewer different problems.
    """
    random = Random(f"countdown {seed} {split}")
    drawn = draw_different(
        "countdown", lambda: draw_problem(random), lambda problem: name_problem(*problem), num_rows, split
    )
    return [solve_row(*problem) for problem in drawn]


def name_problem(numbers: Sequence[int], target: int) -> str:
    """Return a text that is the same for the same numbers in another order."""
    return f"{sorted(numbers)} {target}"


def draw_problem(random: Random) -> tuple[list[int], int]:
    """Draw 3 or 4 numbers from 1 to 99, and a target from 10 to 99 that operations in a row make of them."""
    while True:
        numbers = [random.randint(1, 99)]
        value = numbers[0]
        for _ in range(random.choice((2, 3))):
            operator = random.choice("+-*/")
            divisors = [number for number in range(2, 100) if value % number == 0]
            if operator == "/" and divisors:
                numbers.append(random.choice(divisors))
                value //= numbers[-1]
                continue
            numbers.append(number := random.randint(1, 99))
            value = {"+": value + number, "*": value * number}.get(operator, value - number)
        if 10 <= value <= 99:
            random.shuffle(numbers)
            return numbers, value


def solve_row(numbers: Sequence[int], target: int) -> dict[str, Any]:
    """Return `countdown_row` of a problem that has a solution."""
    row = countdown_row(numbers, target)
    assert row is not None, f"no way from {numbers} to {target}"
    return row


def countdown_row(numbers: Sequence[int], target: int) -> dict[str, Any] | None:
    """Write out a problem and its solution; None if it has no solution.

    Returns:
        Columns `question`, `solution` (the steps, then `\\boxed{EXPRESSION}.`), `answer` (the expression),
        `numbers`, `target` and `kind` ("countdown").
    """
    solution = solve(numbers, target)
    if solution is None:
        return None
    shown = " and ".join(filter(None, (", ".join(map(str, numbers[:-1])), str(numbers[-1]))))
    expression = solution.text()
    steps = f"{'; '.join(solution.steps())}. " if len(numbers) > 1 else ""
    return {
        "question": (
            f"Make {target} from the numbers {shown}. Use each of the numbers exactly once, with +, -, *, / "
            "and parentheses. Write the expression, without an equals sign, in \\boxed{}."
        ),
        "solution": f"{steps}The expression is \\boxed{{{expression}}}.",
        "answer": expression,
        "numbers": list(numbers),
        "target": target,
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


class Term(NamedTuple):
    """A way to make a value: a number, or two terms and the operator between them."""

    value: Value
    operator: str = ""
    left: Term | None = None
    right: Term | None = None

    def text(self) -> str:
        """Return the expression, with the parentheses that it needs."""
        if self.left is None or self.right is None:
            return str(self.value)
        left, right = self.left.text(), self.right.text()
        outer, inner = PRECEDENCE[self.operator], PRECEDENCE[self.right.operator]
        if PRECEDENCE[self.left.operator] < outer:
            left = f"({left})"
        if inner < outer or (inner == outer and self.operator in "-/"):
            right = f"({right})"
        return f"{left} {self.operator} {right}"

    def steps(self) -> list[str]:
        """Return one equation per operator, in an order in which each can be computed."""
        if self.left is None or self.right is None:
            return []
        left, right = (
            f"({term.value})" if isinstance(term.value, Fraction) else str(term.value)
            for term in (self.left, self.right)
        )
        line = f"{left} {self.operator} {right} = {self.value}"
        return [*self.left.steps(), *self.right.steps(), line]


def solve(numbers: Sequence[int], target: int) -> Term | None:
    """Find an expression with + - * / that uses every number exactly once and equals the target.

    The search is exhaustive and exact, and tries ways through whole numbers first. It allows no negative
    intermediate value. That loses nothing: if a tree of operations gives a value, another tree of the same
    numbers gives its magnitude without negative values.

    Args:
        numbers: 1 to MAX_NUMBERS non-negative integers.
        target: A non-negative integer.

    Returns:
        The expression, which does not depend on the order of the numbers; None if there is none.
    """
    assert 1 <= len(numbers) <= MAX_NUMBERS, numbers
    assert min(*numbers, target, 0) >= 0, (numbers, target)
    ordered = tuple(sorted(numbers))
    return build_table(ordered, True, {}).get(target) or build_table(ordered, False, {}).get(target)


def build_table(numbers: Numbers, whole: bool, known: dict[Numbers, dict[Value, Term]]) -> dict[Value, Term]:
    """Return a way to every value that can be made from all of the numbers.

    Args:
        numbers: The numbers.
        whole: Whether to allow only whole numbers.
        known: Tables of parts of the numbers; gets more of them.
    """
    if numbers not in known:
        table: dict[Value, Term] = {numbers[0]: Term(numbers[0])} if len(numbers) == 1 else {}
        for some, others in split_numbers(numbers):
            for left in build_table(some, whole, known).values():
                for right in build_table(others, whole, known).values():
                    for term in combine_terms(left, right, whole):
                        table.setdefault(term.value, term)
        known[numbers] = table
    return known[numbers]


def combine_terms(a: Term, b: Term, whole: bool) -> Iterator[Term]:
    """Yield the terms that one operation makes of two terms."""
    large, small = (a, b) if a.value >= b.value else (b, a)
    yield Term(simplify(large.value + small.value), "+", large, small)
    yield Term(simplify(large.value - small.value), "-", large, small)
    yield Term(simplify(large.value * small.value), "*", large, small)
    for left, right in ((large, small), (small, large)):
        if right.value:
            quotient = Fraction(left.value) / right.value
            if not whole or quotient.denominator == 1:
                yield Term(simplify(quotient), "/", left, right)


def simplify(value: Value) -> Value:
    """Turn a Fraction that is a whole number into an int."""
    return value.numerator if value.denominator == 1 else value


def split_numbers(numbers: Numbers) -> list[tuple[Numbers, Numbers]]:
    """Return all ways to divide the numbers into two parts, each way once."""
    splits: dict[tuple[Numbers, Numbers], None] = {}  # an ordered set
    # The bits of `chosen` say which numbers are in the first part; the last number never is.
    for chosen in range(1, 2 ** (len(numbers) - 1)):
        part = tuple(n for i, n in enumerate(numbers) if chosen >> i & 1)
        rest = tuple(n for i, n in enumerate(numbers) if not chosen >> i & 1)
        splits[part, rest] = None
    return list(splits)
