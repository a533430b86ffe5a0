"""Read what a trace of a stepwise task is: all steps, or how it broke off."""

from __future__ import annotations

import re

from rlt_lightning.tasks.named_chains import Facts, build_named_chain
from rlt_lightning.tasks.stepwise import (
    CHAIN_WORDING,
    VERBS,
    WORD_SUM_WORDING,
    StepwiseProblem,
    TraceKind,
    Wording,
    build_chain,
    build_word_sum,
)

TRACE_KINDS: tuple[TraceKind, ...] = ("steps", "filler", "leap", "wrong", "other")
CHAIN_QUESTION = re.compile(r"start \d(, (add|times) \d)+\?")


def classify_trace(problem: StepwiseProblem, wording: Wording, trace: str) -> tuple[TraceKind, int]:
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
    leap = "|".join(re.escape(leap).replace(r"\{answer\}", r"-?\d+( \d+)*") for leap in wording.leaps)
    step_like = "|".join(re.sub(r"\\?\d+", r"\\d+", re.escape(one)) for one in problem.steps)
    kinds: dict[TraceKind, str] = {
        "leap": leap,
        "filler": f"({filler})({joint}({filler}))*",
        "wrong": f"({step_like})({joint}({step_like}|{filler}|{leap}))*",
    }
    return next(
        (kind for kind, text in kinds.items() if re.match(f"({text}){end}", rest)), "other"
    ), num_right


def parse_chain(question: str) -> StepwiseProblem:
    """Read a question back into its problem."""
    start, *operations = re.findall(r"(start|add|times) (\d)", question)
    return build_chain(int(start[1]), [(name, int(number)) for name, number in operations])


def chain_kind(question: str, trace: str) -> tuple[TraceKind, int]:
    """Return the kind of a trace, and the number of right steps that it begins with."""
    return classify_trace(parse_chain(question), CHAIN_WORDING, trace)


def list_names(question: str) -> list[str]:
    """Return the names in a question of named chains."""
    return question.rstrip("?").split(", ")[2::2]


def parse_named_chain(facts: Facts, question: str) -> StepwiseProblem:
    """Read a question back into its problem, given what each name adds."""
    start, *known = re.findall(r"(start|add|times) (\d)", question)
    named = [(name, facts[name]) for name in list_names(question)]
    return build_named_chain(int(start[1]), [(kind, int(number)) for kind, number in known], named)


def named_chain_kind(facts: Facts, question: str, trace: str) -> tuple[TraceKind, int]:
    """Return the kind of a trace, and the number of right steps that it begins with."""
    return classify_trace(parse_named_chain(facts, question), CHAIN_WORDING, trace)


def parse_word_sum(question: str) -> StepwiseProblem:
    """Read a question back into its problem."""
    [(name, start, thing)] = re.findall(r"^(\w+) has (\d+) (\w+)", question)
    gains = re.findall(rf"({'|'.join(VERBS)}) (\d+)", question)
    return build_word_sum(name, thing, int(start), [(verb, int(number)) for verb, number in gains])


def word_sum_kind(question: str, trace: str) -> tuple[TraceKind, int]:
    """Return the kind of a trace, and the number of right steps that it begins with."""
    return classify_trace(parse_word_sum(question), WORD_SUM_WORDING, trace)
