"""Chains in which every second operation has a name, and only the solutions say what a name means.

"start 4, add 2, blik, times 3, dorf, add 1, quern?" has the solution "\\boxed{9 8 4}", the state after each
named operation, and the steps "4 add 2 is 6, blik is add 3, 6 add 3 is 9, 9 times 3 is 7, dorf is add 1, ..."
What blik is follows from the states around it, 6 and 9. Without the solution nobody can know it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from random import Random

from rlt_lightning.tasks.draw import draw_different
from rlt_lightning.tasks.stepwise import (
    CHAIN_SPLITS,
    CHAIN_WORDING,
    OPERATIONS,
    Mixture,
    Operation,
    StepwiseProblem,
    apply_operation,
    make_rows,
)

NUM_PAIRS = 3  # of a known and a named operation in a problem
NUM_NAMES = 256  # that models of this task have a token for
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
Facts = Mapping[str, int]  # what each name adds


def make_names(num_names: int = NUM_NAMES) -> list[str]:
    """Return different names of five letters, always the same ones."""
    rng, names = Random("names"), dict[str, None]()
    while len(names) < num_names:
        names["".join(map(rng.choice, (CONSONANTS, VOWELS, CONSONANTS, VOWELS, CONSONANTS)))] = None
    return list(names)


def draw_facts(seed: int, num_names: int = NUM_NAMES) -> dict[str, int]:
    """Draw what each of the first names adds, 0 to 9."""
    rng = Random(f"facts {seed}")
    return {name: rng.randrange(10) for name in make_names(num_names)}


def build_named_chain(start: int, known: Sequence[Operation], named: Sequence[Operation]) -> StepwiseProblem:
    """Make the problem of a chain, in which a known operation and a named one alternate.

    Example: `build_named_chain(4, [("add", 2)], [("blik", 3)])` has the question "start 4, add 2, blik?", the
    steps "4 add 2 is 6" and "blik is add 3, 6 add 3 is 9", and the answer "9".
    """
    asked: list[str] = []
    operations: list[tuple[str, Operation]] = []  # what a step says first, and what it does
    for (kind, number), (name, operand) in zip(known, named, strict=True):
        asked += [f"{kind} {number}", name]
        operations += [("", (kind, number)), (f"{name} is add {operand}, ", ("add", operand))]

    def steps(value: int, index: int) -> list[str]:
        sentences = []
        for first, (kind, number) in operations[index:]:
            after = apply_operation(value, (kind, number))
            sentences.append(f"{first}{value} {kind} {number} is {after}")
            value = after
        return sentences

    def derail(index: int, rng: Random) -> list[str]:
        first, (kind, number) = operations[index]
        wrong = rng.choice([digit for digit in range(10) if digit != values[index + 1]])
        return [f"{first}{values[index]} {kind} {number} is {wrong}", *steps(wrong, index + 1)]

    values = [start]
    for _, operation in operations:
        values.append(apply_operation(values[-1], operation))
    answer = " ".join(map(str, values[2::2]))
    return StepwiseProblem(f"start {start}, {', '.join(asked)}?", answer, steps(start, 0), derail)


def draw_named_chain(rng: Random, names: Sequence[str], facts: Facts) -> StepwiseProblem:
    """Draw a problem of some of these names; what one without a fact adds is drawn for this problem only."""
    start, known = rng.randrange(10), [rng.choice(OPERATIONS) for _ in range(NUM_PAIRS)]
    drawn = rng.sample(names, NUM_PAIRS)
    named = [(name, facts[name] if name in facts else rng.randrange(10)) for name in drawn]
    return build_named_chain(start, known, named)


def named_chain_rows(
    num_rows: int, facts: Facts, seed: int = 0, split: str = "train", mixture: Mixture | None = None
) -> list[dict[str, str]]:
    """Make different problems with a trace each; the same arguments give the same rows in every process.

    Args:
        num_rows: Number of rows.
        facts: What each name adds; all names are in problems.
        seed: Seed of problems and traces.
        split: "train" or "test"; "pretrain" is what the models of this task were pretrained on.
        mixture: Quality of the traces; None for all steps right.

    Returns:
        Rows with `question`, `solution`, `reasoning_trace` and `answer`; nothing says which kind a trace is.

    Raises:
        InputError: If there is no such split, or there are fewer different problems.
    """
    rng = Random(f"named chains {seed} {split}")  # seeded with text: the same in every process
    names = list(facts)

    def draw() -> StepwiseProblem:
        return draw_named_chain(rng, names, facts)

    problems = draw_different("named chains", draw, attrgetter("question"), num_rows, split, CHAIN_SPLITS)
    return make_rows(list(problems), CHAIN_WORDING, mixture, rng)


def build_mixture(steps: float, filler: float, leap: float) -> Mixture:
    """Return the mixture in which traces of these kinds, from their start, have these shares.

    All other traces begin with right steps and break off into filler, at each step by the same chance.

    Args:
        steps: Share of traces with all steps right.
        filler: Share of filler.
        leap: Share of leaps.
    """
    broken = 1 - steps - filler - leap
    # Past the first step come steps + broken, and of these (1 - hazard) ** 5 come to the end.
    hazard = 1 - (steps / (steps + broken)) ** (1 / (2 * NUM_PAIRS - 1))
    filler_start = 1 - leap - (steps + broken) / (1 - hazard)
    return Mixture(hazard, filler=1, leap=0, filler_start=filler_start, leap_start=leap)
