"""Refuse, before sampling begins, what cannot fit or makes no sense."""

from __future__ import annotations

from rlt_lightning.types import InputError, Problem


def require_room(problems: list[Problem], role: str, context: int, max_completion_length: int) -> None:
    """Check that every problem and its completion, given or of full length, fit into a context, in tokens.

    Raises:
        InputError: Naming the row, the lengths and the settings that would make room.
    """
    for problem in problems:
        fixed = len(problem.teacher_prompt)
        if role == "student":
            fixed = sum(map(len, (problem.student_prefix, problem.think_prefix, problem.student_suffix)))
            fixed += len(problem.solution_ids)
        given = problem.given_completion
        if given and fixed + len(given.token_ids) > context:
            raise InputError(
                f"Prompt and completion must fit into the {role}'s context of {context} tokens, but row "
                f"{problem.row} needs {fixed + len(given.token_ids)}. Lower data.max_length: longer rows are "
                "counted and kept out."
            )
        if not given and fixed + max_completion_length > context:
            raise InputError(
                f"Prompt and completion must fit into the {role}'s context of {context} tokens, but row "
                f"{problem.row} needs {fixed} + max_completion_length {max_completion_length}. Lower "
                "sampling.max_completion_length, data.max_prompt_length or data.max_solution_length."
            )
