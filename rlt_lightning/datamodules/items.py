"""Turn a parsed row into what a task needs: a problem or a training example."""

from __future__ import annotations

from typing import Literal

from rlt_lightning.datamodules.bad_rows import BadRowError, BadRowReason
from rlt_lightning.types import Problem, SFTExample

Task = Literal["rlt", "teacher_sft", "student_sft", "score", "student_rl"]
LongTraces = Literal["drop", "truncate"]
Item = Problem | SFTExample


def require_length(reason: BadRowReason, length: int, limit: int) -> None:
    """Keep a row out that has more tokens than the limit."""
    if length > limit:
        raise BadRowError(reason, f"{length} tokens, limit {limit}")


def longest_sequence(problem: Problem, num_completion: int) -> int:
    """Tokens of the longer of the two sequences that a problem and a completion make."""
    student = len(problem.student_prefix) + len(problem.think_prefix) + len(problem.student_suffix)
    return num_completion + max(len(problem.teacher_prompt), student + len(problem.solution_ids))
