"""Last-digit chains: a task that a model of 184,000 parameters learns, with traces of uneven quality.

"start 2, add 1, add 3, times 7?" has the steps "2 add 1 is 3, 3 add 3 is 6, 6 times 7 is 2." and the answer
2, since only the last digit of each number counts.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from functools import partial
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

Operation = tuple[str, int]  # its name and its number
# Additions and multiplications are equally likely.
OPERATIONS: tuple[Operation, ...] = (
    *(("add", n) for n in range(1, 6)),
    *(("times", n) for n in (3, 7, 3, 7)),
)
# Operations that the miniatures were not pretrained on; each of their results is equally likely.
NEW_OPERATIONS: tuple[Operation, ...] = (("times", 9), *(("add", n) for n in range(6, 10)))
# All filler begins with one word and all leaps with another: sampling below temperature 1 would drop rarer
# beginnings.
WORDING = Wording(
    filler=(
        "one looks at the numbers",
        "one goes on step by step",
        "one takes the next part",
        "one does this with care",
        "one knows how it goes",
        "one keeps going like this",
        "one gets there in the end",
        "one finds nothing hard here",
    ),
    leaps=(
        "clearly it must be {answer}",
        "clearly it can only be {answer}",
        "clearly the answer is {answer}",
    ),
    joint=", ",
    end=".",
)
# Each split has some of 16 buckets, into which questions fall by their hash.
SPLITS: dict[str, range] = {"test": range(2), "train": range(2, 6), "pretrain": range(6, 16)}


def split_of(question: str) -> str:
    """Return the split that a question belongs to by its hash: no question is in two splits."""
    bucket = zlib.crc32(question.encode()) % 16
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def apply(value: int, operation: Operation) -> int:
    """Return the last digit of a step's result."""
    name, number = operation
    return (value + number if name == "add" else value * number) % 10


def chain(start: int, operations: Sequence[Operation]) -> StepwiseProblem:
    """Make the problem of a chain.

    Example: `chain(2, [("add", 1), ("times", 7)])` has the question "start 2, add 1, times 7?", the steps
    "2 add 1 is 3" and "3 times 7 is 1", and the answer "1".
    """

    def steps(value: int, left: Sequence[Operation]) -> list[str]:
        sentences = []
        for name, number in left:
            after = apply(value, (name, number))
            sentences.append(f"{value} {name} {number} is {after}")
            value = after
        return sentences

    def derail(place: int, rng: Random) -> list[str]:
        before, (name, number) = values[place], operations[place]
        wrong = rng.choice([digit for digit in range(10) if digit != values[place + 1]])
        return [f"{before} {name} {number} is {wrong}", *steps(wrong, operations[place + 1 :])]

    values = [start]
    for operation in operations:
        values.append(apply(values[-1], operation))
    question = f"start {start}, {', '.join(f'{name} {number}' for name, number in operations)}?"
    return StepwiseProblem(question, str(values[-1]), steps(start, operations), derail)


def chain_of(question: str) -> StepwiseProblem:
    """Read a question back into its problem."""
    start, *operations = re.findall(r"(start|add|times) (\d)", question)
    return chain(int(start[1]), [(name, int(number)) for name, number in operations])


def random_chain(
    rng: Random, length: int, split: str, last: Sequence[Operation] = OPERATIONS
) -> StepwiseProblem:
    """Draw a problem of a split, whose last operation is one of `last`."""
    while True:
        start, operations = rng.randrange(10), [rng.choice(OPERATIONS) for _ in range(length - 1)]
        problem = chain(start, [*operations, rng.choice(last)])
        if split_of(problem.question) == split:
            return problem


def chain_kind(question: str, trace: str) -> tuple[TraceKind, int]:
    """Return the kind of a trace, and the number of right steps that it begins with."""
    return kind_of(chain_of(question), WORDING, trace)


def chain_rows(
    num_rows: int,
    seed: int = 0,
    split: str = "train",
    mixture: Mixture | None = Mixture(),  # noqa: B008  (frozen)
    length: int = 5,
    last: Sequence[Operation] = OPERATIONS,
) -> list[dict[str, str]]:
    """Make different problems with a trace each; the same arguments give the same rows in every process.

    Args:
        num_rows: Number of rows.
        seed: Seed of problems and traces.
        split: "train" or "test"; "pretrain" is what the miniatures were pretrained on.
        mixture: Quality of the traces; None for all steps right.
        length: Steps of a problem.
        last: Operations of the last step; NEW_OPERATIONS are in no example of the pretraining.

    Returns:
        Rows with `question`, `solution`, `reasoning_trace` and `answer`; nothing says which kind a trace is.

    Raises:
        InputError: If there is no such split, or there are fewer different problems.
    """
    if split not in SPLITS:
        raise InputError(
            f"The chains source has the splits train and test, but got '{split}'. Use one of them."
        )
    rng = Random(f"chains {seed} {split} {length}")  # seeded with text: the same in every process
    return uneven_rows(
        "chains", lambda rng: random_chain(rng, length, split, last), WORDING, mixture, num_rows, rng
    )


SOURCES: dict[str, Callable[[int, int, str], list[dict[str, Any]]]] = {
    "chains": chain_rows,
    "chains:right": partial(chain_rows, mixture=None),
}
