"""Explanations of uneven quality, like raw reasoning traces.

A trace follows the steps of its problem. Before each step it may break off in one of three ways:

    steps    does not break off: every step, every number right
    filler   right steps, then sentences that say nothing
    leap     right steps, then a jump to the answer
    wrong    right steps, then a wrong number and steps that follow from it
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from rlt_lightning.types import InputError

TraceKind = Literal["steps", "filler", "leap", "wrong", "other"]
TRACE_KINDS: tuple[TraceKind, ...] = ("steps", "filler", "leap", "wrong", "other")
MAX_REPEATS = 1000  # after this many repeats in a row, we say that there are no more questions


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


def uneven_rows(
    source: str,
    draw: Callable[[Random], StepwiseProblem],
    wording: Wording,
    mixture: Mixture | None,
    num_rows: int,
    rng: Random,
) -> list[dict[str, str]]:
    """Draw different problems with a trace each.

    Args:
        source: Name of the source, for messages.
        draw: Draws a problem.
        wording: Sentences of the traces.
        mixture: Quality of the traces; None for all steps right.
        num_rows: Number of rows.
        rng: Generator of all random choices: first the problems, then their traces.

    Returns:
        Rows with `question`, `solution`, `reasoning_trace` and `answer`; nothing says which kind a trace is.

    Raises:
        InputError: If there are fewer different problems.
    """
    problems: dict[str, StepwiseProblem] = {}
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

    def trace(problem: StepwiseProblem) -> str:
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


def uneven_trace(problem: StepwiseProblem, wording: Wording, mixture: Mixture, rng: Random) -> str:
    """Draw a trace for a problem."""
    start = rng.random() if mixture.filler_start or mixture.leap_start else 1.0
    if start < mixture.filler_start + mixture.leap_start:
        kind: TraceKind = "filler" if start < mixture.filler_start else "leap"
        return wording.trace(broken_off(problem, wording, 0, kind, rng))
    for place in range(len(problem.steps)):
        if rng.random() < mixture.hazard:
            draw = rng.random() - mixture.filler
            kind = "filler" if draw < 0 else "leap" if draw < mixture.leap else "wrong"
            return wording.trace([*problem.steps[:place], *broken_off(problem, wording, place, kind, rng)])
    return wording.trace(problem.steps)


def broken_off(
    problem: StepwiseProblem, wording: Wording, place: int, kind: TraceKind, rng: Random
) -> list[str]:
    """Draw the sentences that replace the steps from a given one onwards."""
    if kind == "filler":
        return rng.sample(wording.filler, len(problem.steps) - place)
    if kind == "leap":
        return [rng.choice(wording.leaps).format(answer=problem.answer)]
    return problem.derail(place, rng)


def kind_of(problem: StepwiseProblem, wording: Wording, trace: str) -> tuple[TraceKind, int]:
    """Return the kind of a trace, and the number of right steps that it begins with.

    A leap counts as a leap whatever answer it names. Any step but the expected one counts as wrong. A text of
    no kind is "other".
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
    kinds: dict[TraceKind, str] = {
        "leap": leap,
        "filler": f"({filler})({joint}({filler}))*",
        "wrong": f"({step_like})({joint}({step_like}|{filler}|{leap}))*",
    }
    return next(
        (kind for kind, text in kinds.items() if re.match(f"({text}){end}", rest)), "other"
    ), num_right
