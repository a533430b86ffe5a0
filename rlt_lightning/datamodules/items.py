"""Turn a parsed row into what a task needs: problems or training examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.datamodules.retelling import RetellingFormat
from rlt_lightning.datamodules.rows import TRACE_COLUMN, ParsedRow, parse_row, require_judgeable
from rlt_lightning.datamodules.stored import Item
from rlt_lightning.datamodules.views import TeacherViews
from rlt_lightning.types import BadRowError, BadRowReason, Problem, SFTExample

Task = Literal["rlt", "teacher_sft", "student_sft", "score", "student_rl", "student_opd"]
LongTraces = Literal["drop", "truncate"]


@dataclass(frozen=True)
class ItemMaker:
    """Turn the rows of a source into the items of one task.

    | task | a row becomes |
    |---|---|
    | rlt | one problem for the teacher |
    | student_rl | one problem for the student |
    | student_opd | the same, with what a teacher sees |
    | score | a problem with a given completion, for each trace |
    | teacher_sft, student_sft | a training example, for each trace |

    Args:
        format: Tokenises questions, solutions and traces.
        task: What the rows are made into.
        trace_columns: Columns of the traces.
        keep_row_prompts: Whether a row's own system prompt replaces the student's.
        max_prompt_length: Most tokens of a prompt.
        max_solution_length: Most tokens of a solution; None for no limit.
        max_length: Most tokens of a whole sequence.
        long_traces: Whether fine-tuning drops or truncates longer sequences.
        views: What the teacher of student_opd sees; None in other tasks.
    """

    format: ChatFormat
    task: Task
    trace_columns: list[str]
    keep_row_prompts: bool
    max_prompt_length: int
    max_solution_length: int | None
    max_length: int
    long_traces: LongTraces
    views: TeacherViews | None = None

    @property
    def needed_traces(self) -> list[str]:
        """Return the columns of traces that a row must have."""
        return [] if self.task in ("rlt", "student_rl", "student_opd") else self.trace_columns

    @property
    def takes_completions(self) -> bool:
        """Return whether a row may have a completion in place of a trace."""
        return self.task == "score"

    def parsed(self, columns: dict[str, Any]) -> ParsedRow:
        """Parse a row with the tags of this run.

        Raises:
            BadRowError: If it cannot be used.
        """
        tags, student_tags = self.format.tags, self.format.student_tags
        return parse_row(columns, tags, self.needed_traces, self.takes_completions, student_tags)

    def system_prompt_of(self, row: ParsedRow) -> str:
        """Return the system prompt under which the student sees a row."""
        own = self._system_prompt(row)
        return self.format.student_system_prompt if own is None else own

    def items_of(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> list[Item]:
        """Make one item of a row, or one for each of its traces.

        Args:
            number: Number of the row, from 1.
            row: The row as it was parsed.
            columns: The row as it was read.

        Raises:
            BadRowError: If the row is too long, or an answer to it cannot be judged.
        """
        if self.task == "rlt":
            return [self._problem(number, row, columns)]
        if self.task == "student_rl":
            return [self._student_problem(number, row, columns)]
        if self.task == "student_opd":
            return [self._seen_problem(number, row, columns)]
        makers: dict[Task, Callable[[int, ParsedRow, dict[str, Any], str], Item]] = {
            "score": self._scored_problem,
            "teacher_sft": self._teacher_example,
            "student_sft": self._student_example,
        }
        return [makers[self.task](number, row, columns, name) for name in self.trace_columns]

    def _student_problem(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> Problem:
        system = self._system_prompt(row)
        problem = self.format.student_problem(number, row.question, row.solution, system, columns)
        require_judgeable(problem.reference)
        require_length(BadRowReason.PROMPT_TOO_LONG, len(problem.teacher_prompt), self.max_prompt_length)
        return problem

    def _seen_problem(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> Problem:
        assert self.views is not None
        shown = row.solution if row.shown is None else row.shown
        problem = self.views.problem(number, row, shown, self._system_prompt(row), columns)
        longest = max(len(problem.teacher_prompt), len(problem.teacher_view))
        require_length(BadRowReason.PROMPT_TOO_LONG, longest, self.max_prompt_length)
        return problem

    def _problem(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> Problem:
        problem = self.format.problem(number, row.question, row.solution, self._system_prompt(row), columns)
        require_length(BadRowReason.PROMPT_TOO_LONG, len(problem.teacher_prompt), self.max_prompt_length)
        if self.max_solution_length is not None:
            num_solution = len(problem.solution_ids)
            require_length(BadRowReason.SOLUTION_TOO_LONG, num_solution, self.max_solution_length)
        require_length(BadRowReason.TOO_LONG, longest_sequence(problem, 0, 0), self.max_length)
        return problem

    def _scored_problem(self, number: int, row: ParsedRow, columns: dict[str, Any], name: str) -> Problem:
        if self.trace_columns != [TRACE_COLUMN]:
            columns = {**columns, "trace_column": name}
        problem = self._problem(number, row, columns)
        if row.completion and name == TRACE_COLUMN:
            completion = self.format.completion_from_text(problem, row.completion)
        else:
            completion = self.format.completion_from_trace(problem, row.traces[name])
        num_tokens = num_read = len(completion.token_ids)
        if isinstance(self.format, RetellingFormat):
            num_read = self.format.num_read(problem, completion)
        length = longest_sequence(problem, num_tokens, num_read)
        require_length(BadRowReason.TOO_LONG, length, self.max_length)
        return replace(problem, given_completion=completion)

    def _teacher_example(self, number: int, row: ParsedRow, columns: dict[str, Any], name: str) -> SFTExample:
        problem = self._problem(number, row, columns)
        return self._short_enough(self.format.teacher_sft_example(problem, row.traces[name]))

    def _student_example(self, number: int, row: ParsedRow, columns: dict[str, Any], name: str) -> SFTExample:
        prompt, thought = self._system_prompt(row), row.traces[name]
        example = self.format.student_sft_example(number, row.question, thought, row.solution, prompt)
        num_prompt = example.loss_mask.index(True)
        require_length(BadRowReason.PROMPT_TOO_LONG, num_prompt, self.max_prompt_length)
        return self._short_enough(example)

    def _short_enough(self, example: SFTExample) -> SFTExample:
        if self.long_traces == "truncate" and any(example.loss_mask[: self.max_length]):
            return example.truncated(self.max_length)
        require_length(BadRowReason.TOO_LONG, len(example.token_ids), self.max_length)
        return example

    def _system_prompt(self, row: ParsedRow) -> str | None:
        return row.system if self.keep_row_prompts else None


def require_length(reason: BadRowReason, length: int, limit: int) -> None:
    """Reject a row that has more tokens than the limit."""
    if length > limit:
        raise BadRowError(reason, f"{length} tokens, limit {limit}")


def longest_sequence(problem: Problem, num_completion: int, num_read: int) -> int:
    """Return the tokens of the longer sequence, the teacher's or the student's.

    Args:
        problem: The problem.
        num_completion: Tokens of the completion.
        num_read: The same in the student's tokens.
    """
    student = len(problem.student_prefix) + len(problem.think_prefix) + len(problem.student_suffix)
    student += num_read + len(problem.solution_ids)
    return max(len(problem.teacher_prompt) + num_completion, student)
