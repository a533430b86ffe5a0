"""Turn completions and their scores into rows of JSONL files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from rlt_lightning.datamodules.rows import TRACE_COLUMN, keep_columns
from rlt_lightning.judging.answers import reference_answer
from rlt_lightning.rewards.base import CountedTokens
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.columns import Level, name_columns
from rlt_lightning.rollouts.step import StepBatch
from rlt_lightning.run.jsonl import JsonRow
from rlt_lightning.tags import decode_each
from rlt_lightning.types import Problem, PromptBatch

REFERENCE = ("answer", "kind", "numbers", "target")  # columns by which answers are judged
# Columns of a source that a sampled row has anew; others with our names become `source_NAME`.
RENEWED = {"question", "solution", TRACE_COLUMN, "system", "conversations", *REFERENCE}
MARKS = ("completion", "trace_column")  # by which scoring would take another text for a row's trace


def score_rows(step: StepBatch, rows: Sequence[int]) -> list[dict[str, float]]:
    """Return the reward and its terms, one dictionary per rollout."""
    columns = name_columns(step.choose(rows), "files")
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in values]


def rollout_rows(step: StepBatch, rows: Sequence[int]) -> Iterator[JsonRow]:
    """Yield one JSON-ready row per completion."""
    for row, terms in zip(rows, score_rows(step, rows), strict=True):
        rollout = step.rollout(row)
        columns = {
            "row": rollout.problem.row,
            "completion": row % step.group_size,
            "policy_version": step.policy_version,
            "question": rollout.problem.question,
            "solution": rollout.problem.solution,
            "explanation": rollout.text,
            "finish_reason": rollout.completion.finish_reason,
            "num_tokens": len(rollout.completion.token_ids),
            "seed": rollout.completion.seed,
            "worker": rollout.completion.worker,
        }
        yield dict(**columns, **terms)  # a term with a name that is taken raises an error


def predicted_rows(batch: PromptBatch, data: Any, model: str) -> Iterator[JsonRow]:
    """Yield one row per scored completion: the columns of its source, its text and its scores.

    A teacher's trace has its Bespoke-Stratos form, an answer its own thought and solution and how it was
    judged. An answer that cannot be split stands whole in `reasoning_trace`, with an empty `solution`.

    Args:
        batch: A scored batch.
        data: The datamodule that it comes from.
        model: The name of the model that has sampled what is not given.
    """
    step = batch.step
    for row, terms in zip(step.shard, score_rows(step, step.shard), strict=True):
        rollout, number = step.rollout(row), row % step.group_size
        problem = rollout.problem
        if data.brings_completions:
            yield {**keep_columns(problem.columns, terms), **terms}
            continue
        turn = data.split_turn(rollout)
        thought, solution = turn or (rollout.text, "")
        columns: JsonRow = dict.fromkeys(("system", "conversations"))
        if turn:
            columns = data.format.build_conversation(replace(problem, solution=solution), thought)
        if data.samples == "answers":
            column, first = step.table[Level("correct")], row - number
            correct = column[first : first + step.group_size]
            columns |= read_reference(problem)
            columns |= {"pass_rate": fmean(correct.tolist()), "found_answer": step.texts["answers"][row]}
        columns |= {
            "row": problem.row,
            "trace": number,
            "question": problem.question,
            "solution": solution.strip(),
            "reasoning_trace": thought,
            "closed": rollout.closed,
            "finish_reason": rollout.completion.finish_reason,
            "num_tokens": len(rollout.completion.token_ids),
            "student_tokens": data.count_turn_tokens(rollout),
            "fits": data.fits_student(rollout),
            "seed": rollout.completion.seed,
            "model" if data.samples == "answers" else "teacher": model,
        }
        columns = dict(**columns, **terms)
        yield {**keep_columns(problem.columns, {*columns, *MARKS} - RENEWED), **columns}


def read_reference(problem: Problem) -> JsonRow:
    """Return the columns by which answers to a problem are judged."""
    reference = {name: problem.columns[name] for name in REFERENCE if name in problem.columns}
    if reference.get("kind", "math") != "countdown":
        reference["answer"] = reference_answer(problem.reference)
    return reference


def build_token_columns(tokens: CountedTokens, student: Student) -> JsonRow:
    """Return the tokens that the reward counts, each with its value before clipping and normalisation, nats.

    Args:
        tokens: The result of `Reward.list_tokens`.
        student: The student, with its format.

    Returns:
        `thought_tokens` with `thought_kl`, and `solution_tokens` with `solution_log_probs`, rounded to 1e-6.
    """
    return {
        "thought_tokens": decode_each(student.format.tokenizer, tokens.explanation),
        "thought_kl": [round(value, 6) for value in tokens.kl],
        "solution_tokens": decode_each(student.format.student_tokenizer, tokens.solution),
        "solution_log_probs": [round(value, 6) for value in tokens.solution_log_probs],
    }
