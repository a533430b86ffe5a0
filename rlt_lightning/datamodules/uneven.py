"""Explanations of uneven quality, as raw reasoning traces are.

A trace follows the steps of its problem and may break off before each of them, in one of three ways:

    steps    every step, every number right
    filler   right steps, then sentences that say nothing
    leap     right steps, then a jump to the answer
    wrong    right steps, then a wrong number that is carried on
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from rlt_lightning.types import InputError

Kind = Literal["steps", "filler", "leap", "wrong", "other"]
KINDS: tuple[Kind, ...] = ("steps", "filler", "leap", "wrong", "other")
MAX_REPEATS = 1000  # in a row, before we say that there are no more questions


@dataclass(frozen=True)
class Mixture:
    """How often a trace breaks off, and how.

    Args:
        hazard: Chance to break off at each step that a trace comes to, the first one included.
        filler: Part of the breaks that turn to filler.
        leap: Part of them that leap; the others go wrong.
        filler_start: Chance that a trace is filler from its start, whatever the hazard.
        leap_start: Chance that it leaps from its start.
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
        end: Text behind the last one.
    """

    filler: tuple[str, ...]
    leaps: tuple[str, ...]
    joint: str
    end: str = ""

    def trace(self, sentences: list[str]) -> str:
        """Join sentences."""
        return self.joint.join(sentences) + self.end


@dataclass(frozen=True)
class Problem:
    """One problem, its right steps, and how its steps continue behind a wrong number.

    Args:
        question: What is asked.
        answer: The right answer.
        steps: The right steps, as sentences.
        derail: Given the number of a step, from 0, and a generator: that step with a wrong number, and the
            later ones as they follow from it.
    """

    question: str
    answer: str
    steps: list[str]
    derail: Callable[[int, Random], list[str]]


def uneven_rows(
    source: str,
    draw: Callable[[Random], Problem],
    wording: Wording,
    mixture: Mixture | None,
    num_rows: int,
    rng: Random,
) -> list[dict[str, str]]:
    """Draw different problems with a trace each.

    Args:
        source: Name of the source, for messages.
        draw: Draws a problem.
        wording: Of the traces.
        mixture: Quality of the traces; None for all steps right.
        num_rows: How many.
        rng: What everything is drawn from: first the problems, then their traces.

    Returns:
        Rows with `question`, `solution`, `reasoning_trace` and `answer`; nothing says which kind a trace is.

    Raises:
        InputError: If so many different problems do not exist.
    """
    problems: dict[str, Problem] = {}
    repeats = 0
    while len(problems) < num_rows:
        problem = draw(rng)
        repeats = repeats + 1 if problem.question in problems else 0
        problems[problem.question] = problem
        if repeats > MAX_REPEATS:
            raise InputError(
                f"The {source} source has about {len(problems)} different rows of these settings, but "
                f"{num_rows} were asked for. Lower data.num_embedded_rows."
            )

    def trace(problem: Problem) -> str:
        return uneven_trace(problem, wording, mixture, rng) if mixture else wording.trace(problem.steps)

    return [
        {
            "question": problem.question,
            "solution": f"\\boxed{{{problem.answer}}}",
            "reasoning_trace": trace(problem),
            "answer": problem.answer,
        }
        for problem in problems.values()
    ]


def uneven_trace(problem: Problem, wording: Wording, mixture: Mixture, rng: Random) -> str:
    """Draw a trace for a problem."""
    start = rng.random() if mixture.filler_start or mixture.leap_start else 1.0
    if start < mixture.filler_start + mixture.leap_start:
        kind: Kind = "filler" if start < mixture.filler_start else "leap"
        return wording.trace(broken_off(problem, wording, 0, kind, rng))
    for place in range(len(problem.steps)):
        if rng.random() < mixture.hazard:
            draw = rng.random() - mixture.filler
            kind = "filler" if draw < 0 else "leap" if draw < mixture.leap else "wrong"
            return wording.trace([*problem.steps[:place], *broken_off(problem, wording, place, kind, rng)])
    return wording.trace(problem.steps)


def broken_off(problem: Problem, wording: Wording, place: int, kind: Kind, rng: Random) -> list[str]:
    """Draw the sentences that stand in place of the steps from a given one on."""
    if kind == "filler":
        return rng.sample(wording.filler, len(problem.steps) - place)
    if kind == "leap":
        return [rng.choice(wording.leaps).format(answer=problem.answer)]
    return problem.derail(place, rng)


def kind_of(problem: Problem, wording: Wording, trace: str) -> tuple[Kind, int]:
    """Say which kind a trace has, and how many right steps it begins with.

    A leap counts as one whatever answer it names; any other step than the one that is due counts as wrong.
    A text that is none of the kinds is "other".
    """
    joint = re.escape(wording.joint.rstrip()) + r"\s+"
    end = f"({re.escape(wording.end)})?" + r"\Z"
    rest, num_right = trace.strip(), 0
    while num_right < len(problem.steps):
        step = re.match(f"{re.escape(problem.steps[num_right])}({joint}|{end})", rest)
        if step is None:
            break
        rest = rest[step.end() :]
        num_right += 1
    if num_right == len(problem.steps):
        return ("other" if rest else "steps"), num_right
    filler = "|".join(map(re.escape, wording.filler))
    leap = "|".join(re.escape(leap).replace(r"\{answer\}", r"-?\d+") for leap in wording.leaps)
    step_like = "|".join(re.sub(r"\\?\d+", r"\\d+", re.escape(one)) for one in problem.steps)
    kinds: dict[Kind, str] = {
        "leap": leap,
        "filler": f"({filler})({joint}({filler}))*",
        "wrong": f"({step_like})({joint}({step_like}|{filler}|{leap}))*",
    }
    return next(
        (kind for kind, text in kinds.items() if re.match(f"({text}){end}", rest)), "other"
    ), num_right
