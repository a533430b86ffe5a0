"""Word problems of three small sums, with traces of uneven quality, for a real language model.

"Ana has 8 shells, buys 5, finds 3 and gets 4. How many shells does Ana have now?" has the steps
"8 + 5 = 13. 13 + 3 = 16. 16 + 4 = 20." and the answer 20. There are only additions of 2 to 5, with sums below
25: SmolLM2-135M solves 7 in 10 of them, but only 2 in 10 subtractions of such numbers.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from random import Random
from typing import Any

from rlt_lightning.datamodules.uneven import (
    Mixture,
    StepwiseProblem,
    TraceKind,
    Wording,
    kind_of,
    uneven_rows,
)
from rlt_lightning.types import InputError

NAMES = ("Ana", "Tom", "Lee", "Sara", "Omar", "Nina", "Kim", "Raj")
THINGS = ("apples", "coins", "books", "stamps", "shells", "cards")
VERBS = ("buys", "finds", "gets")
STARTS, GAINS = range(3, 10), range(2, 6)
# Traces have more right steps than in the chains: a real model must learn from a few hundred of them.
MIXTURE = Mixture(hazard=0.2, filler=0.45, leap=0.3, filler_start=0.3, leap_start=0.2)
WORDING = Wording(
    filler=(
        "First we read the problem with care",
        "Then we do what it says",
        "This is not hard",
        "We take one thing after another",
        "That gives us what was asked",
        "It helps to think about it",
    ),
    leaps=(
        "It is easy to see that the answer is {answer}",
        "Clearly the answer must be {answer}",
        "One sees at once that it is {answer}",
    ),
    joint=". ",
    end=".",
)
TEST_SHARE = 8  # one question in 8 belongs to the test split, by its hash, whatever the seed


def word_sum(name: str, thing: str, start: int, gains: Sequence[tuple[str, int]]) -> StepwiseProblem:
    """Make the problem of a person who has some things and gets more of them.

    Example: `word_sum("Ana", "shells", 8, [("buys", 5), ("finds", 3)])` has the question "Ana has 8 shells,
    buys 5 and finds 3. How many shells does Ana have now?", the steps "8 + 5 = 13" and "13 + 3 = 16", and the
    answer "16".
    """
    numbers = [number for _, number in gains]
    values = list(accumulate(numbers, initial=start))

    def steps(value: int, left: Sequence[int]) -> list[str]:
        sums = accumulate(left, initial=value)
        return [
            f"{before} + {number} = {before + number}" for before, number in zip(sums, left, strict=False)
        ]

    def derail(place: int, rng: Random) -> list[str]:
        wrong = values[place + 1] + rng.choice((-2, -1, 1, 2))
        return [f"{values[place]} + {numbers[place]} = {wrong}", *steps(wrong, numbers[place + 1 :])]

    happened = [f"{verb} {number}" for verb, number in gains]
    question = (
        f"{name} has {start} {thing}, {', '.join(happened[:-1])} and {happened[-1]}. "
        f"How many {thing} does {name} have now?"
    )
    return StepwiseProblem(question, str(values[-1]), steps(start, numbers), derail)


def word_sum_of(question: str) -> StepwiseProblem:
    """Read a question back into its problem."""
    [(name, start, thing)] = re.findall(r"^(\w+) has (\d+) (\w+)", question)
    gains = re.findall(rf"({'|'.join(VERBS)}) (\d+)", question)
    return word_sum(name, thing, int(start), [(verb, int(number)) for verb, number in gains])


def random_word_sum(rng: Random, length: int, split: str) -> StepwiseProblem:
    """Draw a problem of a split."""
    while True:
        gains = [(rng.choice(VERBS), rng.choice(GAINS)) for _ in range(length)]
        problem = word_sum(rng.choice(NAMES), rng.choice(THINGS), rng.choice(STARTS), gains)
        if (zlib.crc32(problem.question.encode()) % TEST_SHARE == 0) == (split == "test"):
            return problem


def word_sum_kind(question: str, trace: str) -> tuple[TraceKind, int]:
    """Return the kind of a trace, and the number of right steps that it begins with."""
    return kind_of(word_sum_of(question), WORDING, trace)


def word_sum_rows(
    num_rows: int,
    seed: int = 0,
    split: str = "train",
    mixture: Mixture | None = MIXTURE,
    length: int = 3,
) -> list[dict[str, str]]:
    """Make different problems with a trace each; the same arguments give the same rows in every process.

    Args:
        num_rows: Number of rows.
        seed: Seed of problems and traces.
        split: "train" or "test"; a question is in the same split whatever the seed.
        mixture: Quality of the traces; None for all steps right.
        length: Steps of a problem, at least two.

    Returns:
        Rows with `question`, `solution`, `reasoning_trace` and `answer`; nothing says which kind a trace is.

    Raises:
        InputError: If there is no such split, or there are fewer different problems.
    """
    if split not in ("train", "test"):
        raise InputError(
            f"The word_sums source has the splits train and test, but got '{split}'. Use one of them."
        )
    rng = Random(f"word_sums {seed} {split} {length}")  # seeded with text: the same in every process
    return uneven_rows(
        "word_sums", lambda rng: random_word_sum(rng, length, split), WORDING, mixture, num_rows, rng
    )


SOURCES: dict[str, Callable[[int, int, str], list[dict[str, Any]]]] = {
    "word_sums": word_sum_rows,
    "word_sums:right": partial(word_sum_rows, mixture=None),
}
