"""The rows of a model's own answers, of which the usual pipeline (rejection sampling) keeps right ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

from rlt_lightning.datamodules.stratos import StratosDataModule
from rlt_lightning.judging.answers import reference_answer
from rlt_lightning.modules.text_reward import CorrectnessTerms
from rlt_lightning.run.jsonl import Row
from rlt_lightning.run.rollout_rows import completion_columns, score_rows
from rlt_lightning.types import Problem, PromptBatch

REFERENCE = ("answer", "kind", "numbers", "target")  # columns by which answers are judged


def answer_rows(batch: PromptBatch, data: StratosDataModule, model: str) -> Iterator[Row]:
    """Yield a row per answer: the source's columns, its own thought and solution, and how it was judged.

    An answer that cannot be split stands whole in `reasoning_trace`, with an empty `solution`.
    """
    assert batch.rollouts is not None
    assert batch.scores is not None
    terms = batch.scores.terms
    assert isinstance(terms, CorrectnessTerms)
    size, correct = batch.rollouts.group_size, terms.correct.tolist()
    for i, (rollout, scores) in enumerate(
        zip(batch.rollouts.rollouts, score_rows(batch.scores), strict=True)
    ):
        problem, first = rollout.problem, i - i % size
        turn = data.split_turn(rollout)
        thought, solution = turn or (rollout.text, "")
        own = replace(problem, solution=solution)
        kept = {name: value for name, value in problem.columns.items() if name != "completion"}
        yield {
            **kept,
            **reference_of(problem),
            "row": problem.row,
            "trace": i % size,
            "question": problem.question,
            "solution": solution,
            "reasoning_trace": thought,
            **(
                data.format.conversation(own, thought) if turn else dict.fromkeys(("system", "conversations"))
            ),
            **scores,
            "pass_rate": fmean(correct[first : first + size]),
            "found_answer": terms.answers[i],
            **completion_columns(rollout, data),
            "model": model,
        }


def reference_of(problem: Problem) -> Row:
    """Return what answers to a problem are judged by, as rows have it."""
    found = {name: problem.columns[name] for name in REFERENCE if name in problem.columns}
    if found.get("kind", "math") != "countdown":
        found["answer"] = reference_answer(problem.reference)
    return found


def is_answer_to(row: Row, problem: Problem) -> bool:
    """Return whether an answer was written for a problem with the same question and reference."""
    expected = {"row": problem.row, "question": problem.question, **reference_of(problem)}
    return all(row.get(name) == value for name, value in expected.items())


def is_split(row: Row) -> bool:
    """Return whether an answer has a thought and a solution."""
    return bool(row["solution"])


def may_be_kept(row: Row) -> bool:
    """Return whether an answer is right, and a student can learn from it."""
    return is_split(row) and row["correct"] > 0 and bool(row["fits"])


def answer_counts(rows: list[Row], num_kept: int) -> dict[str, int]:
    """Return how many answers were kept and why the others were not; the counts add up to all answers."""
    unformatted = sum(not is_split(row) for row in rows)
    wrong = sum(is_split(row) and not row["correct"] for row in rows)
    usable = sum(map(may_be_kept, rows))
    return {
        "kept": num_kept,
        "unformatted": unformatted,
        "wrong": wrong,
        "right, but open or too long": len(rows) - unformatted - wrong - usable,
        "right, but not selected": usable - num_kept,
    }


def answer_recipe(rows: list[Row], num_problems: int) -> dict[str, Any]:
    """Return the figures of all answers, for a data card."""
    rates = {row["row"]: row["pass_rate"] for row in rows}
    return {
        "problems": f"{len(rates)} of {num_problems}",
        "answers sampled": len(rows),
        "mean pass rate": f"{fmean(rates.values()):.4f}",
        "problems with a right answer": sum(rate > 0 for rate in rates.values()),
        "problems with only right answers": sum(rate == 1 for rate in rates.values()),
    }
