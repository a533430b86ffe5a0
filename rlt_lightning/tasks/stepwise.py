"""Problems of a few steps, with explanations of uneven quality, like raw reasoning traces.

A trace follows the steps of its problem. Before each step it may break off in one of three ways:

    steps    does not break off: every step, every number right
    filler   right steps, then sentences that say nothing
    leap     right steps, then a jump to the answer
    wrong    right steps, then a wrong number and steps that follow from it

There are three such tasks:

    chains      "start 2, add 1, add 3, times 7?" has the steps "2 add 1 is 3, 3 add 3 is 6, 6 times 7 is 2."
                and the answer 2, since only the last digit counts: a model of 184,000 parameters learns it
    new_chains  the same, but the last operation is one that the miniatures were not pretrained on: only the
                solution tells what "times 9" and "add 6" to "add 9" do
    word_sums   "Ana has 8 shells, buys 5, finds 3 and gets 4. How many shells does Ana have now?" has the
                steps "8 + 5 = 13. 13 + 3 = 16. 16 + 4 = 20." and the answer 20, for a real language model.
                There are only additions of 2 to 5, with sums below 25: SmolLM2-135M solves 7 in 10 of them,
                but only 2 in 10 subtractions of such numbers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from random import Random
from typing import Literal

from rlt_lightning.tasks.draw import Splits, draw_different

TraceKind = Literal["steps", "filler", "leap", "wrong", "other"]


@dataclass(frozen=True)
class Mixture:
    """How often a trace breaks off, and how.

    Args:
        hazard: Chance to break off at each step that a trace reaches, the first one included.
        filler: Part of the breaks that continue with filler.
        leap: Part of the breaks that leap; the others continue with a wrong number.
        filler_start: Chance that a trace is filler from its start, whatever the hazard.
        leap_start: Chance that a trace leaps at its start.
    """

    hazard: float = 0.42
    filler: float = 0.58
    leap: float = 0.36
    filler_start: float = 0.0
    leap_start: float = 0.0


@dataclass(frozen=True)
class Wording:
    """The sentences of a task's traces, and how they are joined.

    Args:
        filler: Sentences that say nothing; at least as many as a problem has steps.
        leaps: Jumps to the answer, with the placeholder {answer}.
        joint: Text between two sentences.
        end: Text after the last one.
    """

    filler: tuple[str, ...]
    leaps: tuple[str, ...]
    joint: str
    end: str = ""

    def trace(self, sentences: list[str]) -> str:
        """Join sentences."""
        return self.joint.join(sentences) + self.end


@dataclass(frozen=True)
class StepwiseProblem:
    """One problem, its right steps, and how its steps continue after a wrong number.

    Args:
        question: The question.
        answer: The right answer.
        steps: The right steps, as sentences.
        derail: Takes the number of a step, from 0, and a generator. Returns that step with a wrong number,
            and the later steps that follow from it.
    """

    question: str
    answer: str
    steps: list[str]
    derail: Callable[[int, Random], list[str]]


def make_rows(
    problems: list[StepwiseProblem], wording: Wording, mixture: Mixture | None, rng: Random
) -> list[dict[str, str]]:
    """Draw a trace for each problem.

    Args:
        problems: The problems.
        wording: Sentences of the traces.
        mixture: Quality of the traces; None for all steps right.
        rng: Generator of the traces.

    Returns:
        Rows with `question`, `solution`, `reasoning_trace` and `answer`; nothing says which kind a trace is.
    """
    return [
        {
            "question": problem.question,
            "solution": f"\\boxed{{{problem.answer}}}",
            "reasoning_trace": (
                draw_trace(problem, wording, mixture, rng) if mixture else wording.trace(problem.steps)
            ),
            "answer": problem.answer,
        }
        for problem in problems
    ]


def draw_trace(problem: StepwiseProblem, wording: Wording, mixture: Mixture, rng: Random) -> str:
    """Draw a trace for a problem."""
    start = rng.random() if mixture.filler_start or mixture.leap_start else 1.0
    if start < mixture.filler_start + mixture.leap_start:
        kind: TraceKind = "filler" if start < mixture.filler_start else "leap"
        return wording.trace(draw_ending(problem, wording, 0, kind, rng))
    for index in range(len(problem.steps)):
        if rng.random() < mixture.hazard:
            draw = rng.random() - mixture.filler
            kind = "filler" if draw < 0 else "leap" if draw < mixture.leap else "wrong"
            return wording.trace([*problem.steps[:index], *draw_ending(problem, wording, index, kind, rng)])
    return wording.trace(problem.steps)


def draw_ending(
    problem: StepwiseProblem, wording: Wording, index: int, kind: TraceKind, rng: Random
) -> list[str]:
    """Draw the sentences that replace the steps from a given one onwards."""
    if kind == "filler":
        return rng.sample(wording.filler, len(problem.steps) - index)
    if kind == "leap":
        return [rng.choice(wording.leaps).format(answer=problem.answer)]
    return problem.derail(index, rng)


# Last-digit chains

Operation = tuple[str, int]  # its name and its number
# Additions and multiplications are equally likely.
OPERATIONS: tuple[Operation, ...] = (
    *(("add", n) for n in range(1, 6)),
    *(("times", n) for n in (3, 7, 3, 7)),
)
# Operations that the miniatures were not pretrained on; each of their results is equally likely.
NEW_OPERATIONS: tuple[Operation, ...] = (("times", 9), *(("add", n) for n in range(6, 10)))
# Breaks off less often: from the usual mixture a warm-up does not learn to use the solution at a new step.
NEW_MIXTURE = Mixture(hazard=0.2)
# All filler begins with one word and all leaps with another: sampling below temperature 1 would drop rarer
# beginnings.
CHAIN_WORDING = Wording(
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
# "pretrain" is what the miniatures were pretrained on.
CHAIN_SPLITS: Splits = {"test": range(2), "train": range(2, 6), "pretrain": range(6, 16)}


def apply_operation(value: int, operation: Operation) -> int:
    """Return the last digit of a step's result."""
    name, number = operation
    return (value + number if name == "add" else value * number) % 10


def build_chain(start: int, operations: Sequence[Operation]) -> StepwiseProblem:
    """Make the problem of a chain.

    Example: `build_chain(2, [("add", 1), ("times", 7)])` has the question "start 2, add 1, times 7?", the
    steps "2 add 1 is 3" and "3 times 7 is 1", and the answer "1".
    """

    def steps(value: int, left: Sequence[Operation]) -> list[str]:
        sentences = []
        for name, number in left:
            after = apply_operation(value, (name, number))
            sentences.append(f"{value} {name} {number} is {after}")
            value = after
        return sentences

    def derail(index: int, rng: Random) -> list[str]:
        before, (name, number) = values[index], operations[index]
        wrong = rng.choice([digit for digit in range(10) if digit != values[index + 1]])
        return [f"{before} {name} {number} is {wrong}", *steps(wrong, operations[index + 1 :])]

    values = [start]
    for operation in operations:
        values.append(apply_operation(values[-1], operation))
    question = f"start {start}, {', '.join(f'{name} {number}' for name, number in operations)}?"
    return StepwiseProblem(question, str(values[-1]), steps(start, operations), derail)


def draw_chains(
    rng: Random, num_problems: int, length: int, split: str, last: Sequence[Operation] = OPERATIONS
) -> list[StepwiseProblem]:
    """Draw different problems of a split, whose last operation is one of `last`."""

    def draw() -> StepwiseProblem:
        start, operations = rng.randrange(10), [rng.choice(OPERATIONS) for _ in range(length - 1)]
        return build_chain(start, [*operations, rng.choice(last)])

    return list(draw_different("chains", draw, attrgetter("question"), num_problems, split, CHAIN_SPLITS))


def chain_rows(
    num_rows: int,
    seed: int = 0,
    split: str = "train",
    mixture: Mixture | None = Mixture(),
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
    rng = Random(f"chains {seed} {split} {length}")  # seeded with text: the same in every process
    problems = draw_chains(rng, num_rows, length, split, last)
    return make_rows(problems, CHAIN_WORDING, mixture, rng)


# Word sums

NAMES = ("Ana", "Tom", "Lee", "Sara", "Omar", "Nina", "Kim", "Raj")
THINGS = ("apples", "coins", "books", "stamps", "shells", "cards")
VERBS = ("buys", "finds", "gets")
STARTS, GAINS = range(3, 10), range(2, 6)
WORD_SUM_STEPS = 3
# Traces have more right steps than in the chains: a real model must learn from a few hundred of them.
WORD_SUM_MIXTURE = Mixture(hazard=0.2, filler=0.45, leap=0.3, filler_start=0.3, leap_start=0.2)
WORD_SUM_WORDING = Wording(
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


def build_word_sum(name: str, thing: str, start: int, gains: Sequence[tuple[str, int]]) -> StepwiseProblem:
    """Make the problem of a person who has some things and gets more of them.

    Example: `build_word_sum("Ana", "shells", 8, [("buys", 5), ("finds", 3)])` has the question "Ana has 8
    shells, buys 5 and finds 3. How many shells does Ana have now?", the steps "8 + 5 = 13" and "13 + 3 = 16",
    and the answer "16".
    """
    numbers = [number for _, number in gains]
    values = list(accumulate(numbers, initial=start))

    def steps(value: int, left: Sequence[int]) -> list[str]:
        sums = accumulate(left, initial=value)
        return [
            f"{before} + {number} = {before + number}" for before, number in zip(sums, left, strict=False)
        ]

    def derail(index: int, rng: Random) -> list[str]:
        wrong = values[index + 1] + rng.choice((-2, -1, 1, 2))
        return [f"{values[index]} + {numbers[index]} = {wrong}", *steps(wrong, numbers[index + 1 :])]

    happened = [f"{verb} {number}" for verb, number in gains]
    question = (
        f"{name} has {start} {thing}, {', '.join(happened[:-1])} and {happened[-1]}. "
        f"How many {thing} does {name} have now?"
    )
    return StepwiseProblem(question, str(values[-1]), steps(start, numbers), derail)


def word_sum_rows(
    num_rows: int,
    seed: int = 0,
    split: str = "train",
    mixture: Mixture | None = WORD_SUM_MIXTURE,
) -> list[dict[str, str]]:
    """Make different problems with a trace each; the same arguments give the same rows in every process.

    Args:
        num_rows: Number of rows.
        seed: Seed of problems and traces.
        split: "train" or "test"; a question is in the same split whatever the seed.
        mixture: Quality of the traces; None for all steps right.

    Returns:
        Rows with `question`, `solution`, `reasoning_trace` and `answer`; nothing says which kind a trace is.

    Raises:
        InputError: If there is no such split, or there are fewer different problems.
    """
    rng = Random(f"word_sums {seed} {split} {WORD_SUM_STEPS}")  # text: the same in every process

    def draw() -> StepwiseProblem:
        gains = [(rng.choice(VERBS), rng.choice(GAINS)) for _ in range(WORD_SUM_STEPS)]
        return build_word_sum(rng.choice(NAMES), rng.choice(THINGS), rng.choice(STARTS), gains)

    problems = list(draw_different("word_sums", draw, attrgetter("question"), num_rows, split))
    return make_rows(problems, WORD_SUM_WORDING, mixture, rng)
