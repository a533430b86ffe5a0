"""Word problems of three small sums, with traces of uneven quality, for a real language model.

"Ana has 12 shells, buys 5, gives away 3 and finds 7. How many shells does Ana have now?" has the steps
"12 + 5 = 17. 17 - 3 = 14. 14 + 7 = 21." and the answer 21. All numbers are below 30, so that SmolLM2-135M can do
the single sums; what it lacks is the habit of doing them one after another.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from functools import partial
from random import Random

from rlt_lightning.datamodules.uneven import Kind, Mixture, Problem, Wording, kind_of, uneven_trace
from rlt_lightning.types import InputError

NAMES = ("Ana", "Tom", "Lee", "Sara", "Omar", "Nina", "Kim", "Raj")
THINGS = ("apples", "coins", "books", "stamps", "shells", "cards")
GAINS = ("buys", "finds", "gets")
LOSSES = ("gives away", "loses", "sells")
LOWEST, HIGHEST = 2, 29  # of what someone has after each step
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
TEST_SHARE = 8  # one question in so many belongs to the test split, by its hash, whatever the seed
MAX_REPEATS = 1000  # in a row, before we say that there are no more questions


def word_sum(name: str, thing: str, start: int, changes: Sequence[tuple[str, int]]) -> Problem:
    """Make the problem of someone who has something and gains or loses some of it.

    Example: `word_sum("Ana", "shells", 12, [("buys", 5), ("loses", 3)])` has the question "Ana has 12 shells,
    buys 5 and loses 3. How many shells does Ana have now?", the steps "12 + 5 = 17" and "17 - 3 = 14", and the
    answer "14".
    """

    def steps(value: int, left: Sequence[tuple[str, int]]) -> list[str]:
        sentences = []
        for verb, number in left:
            after = value + signed(verb, number)
            sentences.append(f"{value} {'-' if verb in LOSSES else '+'} {number} = {after}")
            value = after
        return sentences

    def derail(place: int, rng: Random) -> list[str]:
        right_step, _, result = steps(values[place], changes[place:])[0].rpartition(" ")
        wrong = int(result) + rng.choice((-3, -2, -1, 1, 2, 3))
        return [f"{right_step} {wrong}", *steps(wrong, changes[place + 1 :])]

    values = [start]
    for verb, number in changes:
        values.append(values[-1] + signed(verb, number))
    happened = [f"{verb} {number}" for verb, number in changes]
    question = (
        f"{name} has {start} {thing}, {', '.join(happened[:-1])} and {happened[-1]}. "
        f"How many {thing} does {name} have now?"
    )
    return Problem(question, str(values[-1]), steps(start, changes), derail)


def signed(verb: str, number: int) -> int:
    """Return by how much a change moves what someone has."""
    return -number if verb in LOSSES else number


def word_sum_of(question: str) -> Problem:
    """Read a question back into its problem."""
    name, start, thing = re.match(r"(\w+) has (\d+) (\w+)", question).groups()  # type: ignore[union-attr]
    changes = re.findall(rf"({'|'.join(GAINS + LOSSES)}) (\d+)", question)
    return word_sum(name, thing, int(start), [(verb, int(number)) for verb, number in changes])


def random_word_sum(rng: Random, length: int, split: str) -> Problem:
    """Draw a problem of a split."""
    while True:
        start = value = rng.randint(8, 20)
        changes = []
        for _ in range(length):
            # A loss of two at least, and never below the lowest value.
            can_lose, can_gain = value - LOWEST >= 2, HIGHEST - value >= 2
            loses = can_lose and (not can_gain or rng.random() < 0.5)
            room = value - LOWEST if loses else HIGHEST - value
            change = (rng.choice(LOSSES if loses else GAINS), rng.randint(2, min(9, room)))
            changes.append(change)
            value += signed(*change)
        problem = word_sum(rng.choice(NAMES), rng.choice(THINGS), start, changes)
        if (zlib.crc32(problem.question.encode()) % TEST_SHARE == 0) == (split == "test"):
            return problem


def word_sum_kind(question: str, trace: str) -> tuple[Kind, int]:
    """Say which kind of trace this is, and how many right steps it begins with."""
    return kind_of(word_sum_of(question), WORDING, trace)


def word_sum_rows(
    num_rows: int,
    seed: int = 0,
    split: str = "train",
    mixture: Mixture | None = Mixture(),  # noqa: B008  (frozen)
    length: int = 3,
) -> list[dict[str, str]]:
    """Make different problems with a trace each, the same ones for the same arguments in every process.

    Args:
        num_rows: How many.
        seed: Of problems and traces.
        split: "train" or "test"; a question belongs to one of them only, also across seeds.
        mixture: Quality of the traces; None for all steps right.
        length: Steps of a problem, at least two.

    Returns:
        Rows with `question`, `solution`, `reasoning_trace` and `answer`; nothing says which kind a trace is.

    Raises:
        InputError: If there is no such split, or so many different problems do not exist.
    """
    if split not in ("train", "test"):
        raise InputError(
            f"The word_sums source has the splits train and test, but got '{split}'. Use one of them."
        )
    rng = Random(f"word_sums {seed} {split} {length}")  # seeded with text: the same in every process
    problems: dict[str, Problem] = {}
    repeats = 0
    while len(problems) < num_rows:
        problem = random_word_sum(rng, length, split)
        repeats = repeats + 1 if problem.question in problems else 0
        problems[problem.question] = problem
        if repeats > MAX_REPEATS:
            raise InputError(
                f"The word_sums source has about {len(problems)} different rows of {length} steps, but "
                f"{num_rows} were asked for. Lower data.num_embedded_rows."
            )
    return [
        {
            "question": problem.question,
            "solution": f"\\boxed{{{problem.answer}}}",
            "reasoning_trace": uneven_trace(problem, WORDING, mixture, rng)
            if mixture
            else WORDING.trace(problem.steps),
            "answer": problem.answer,
        }
        for problem in problems.values()
    ]


SOURCES = {"word_sums": word_sum_rows, "word_sums:right": partial(word_sum_rows, mixture=None)}
