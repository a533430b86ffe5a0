"""What a stage makes of its rows and of completions: formats, items, rollouts.

    row ─▶ complete ─▶ parse ─▶ build_items ─▶ table                see `make_items`
              └──────────┴───────────┴──▶ BadRowReport: why a row is not used

`StratosDataModule` (stratos.py) adds the settings, reads sources and makes the loaders; a stage is a subclass
of that (stages.py), which says what becomes of a row and of a completion.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from rlt_lightning.datamodules.bad_rows import BadRowReport, NumberedRow
from rlt_lightning.datamodules.cross_tokenizer import load_tokenizers
from rlt_lightning.datamodules.format_choice import ChosenFormat, FormatOptions, choose_format, require_model
from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.datamodules.rows import ParsedRow, find_tag, parse_row
from rlt_lightning.datamodules.token_cache import Item, flatten_item, hash_columns
from rlt_lightning.models.format import Role
from rlt_lightning.tags import escape_half_pairs
from rlt_lightning.types import BadRowError, BadRowReason, Completion, Problem, Rollout

# The pieces of a problem that stand around a completion in a sequence of the teacher, or of the student.
FIXED_PIECES = {
    "teacher": ("teacher_prefix", "think_prefix"),
    "student": ("student_prefix", "think_prefix", "student_suffix", "solution_ids"),
}


class ItemMaker(ABC):
    """What a stage says of its rows and of its completions.

    Attributes:
        role: The model that a run of this stage trains, or whose work it scores.
        samples: What the completions are: explanations, answers or thoughts; '' in fine-tuning.
        brings_completions: Whether rows bring the completions: their traces, or a completion in place of one.
        solution_in_tags: Whether a model reads or writes the solution between tags.
        student_reads: Whether a student reads the completions.
        teacher_reads: Whether a teacher does, in a context with the solution.
        chosen: The settings of `format`; set by `load_format`, like it.
        format: The contexts of the teacher and of the student.
    """

    role: ClassVar[Role]
    samples: ClassVar[str] = ""
    brings_completions: ClassVar[bool] = False
    solution_in_tags: ClassVar[bool] = True
    student_reads: ClassVar[bool] = False
    teacher_reads: ClassVar[bool] = False
    chosen: ChosenFormat
    format: ChatFormat
    # Settings; those that not all stages have, such as `trace_columns`, have these values elsewhere.
    tokenizer_name: str | None
    format_options: FormatOptions
    trust_remote_code: bool
    max_prompt_length: int
    trace_columns: list[str]
    reader_name: str | None = None  # of the frozen model that reads completions
    student_context: int | None = None
    max_length: int = sys.maxsize

    # What a stage says of its rows

    def choose_format(self, model: str) -> ChosenFormat:
        """Choose the format; of a student that is trained, the student's."""
        return choose_format(self.format_options, None, model)

    def load_format(self) -> None:
        """Choose the format, and load the tokenizers.

        Raises:
            InputError: If a setting contradicts what a model was trained in, or a tokenizer cannot be loaded.
        """
        model, student = require_model(self.tokenizer_name), self.reader_name if self.student_reads else None
        self.chosen = self.choose_format(model)
        self.format = self.chosen.build_format(*load_tokenizers(model, student, self.trust_remote_code))

    def complete(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of a row, with those that the stage can derive from the others."""
        return columns

    def parse(self, columns: dict[str, Any]) -> ParsedRow:
        """Parse a row with the tags of this run.

        Raises:
            BadRowError: If it cannot be used.
        """
        tags, student_tags = self.format.tags, self.format.student_tags
        options = self.trace_columns, self.brings_completions, student_tags, self.solution_in_tags
        return parse_row(columns, tags, *options)

    @abstractmethod
    def build_items(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> list[Item]:
        """Make one item of a row, or one for each of its traces.

        Args:
            number: Number of the row, from 1.
            row: The row as it was parsed.
            columns: The row as it was read.

        Raises:
            BadRowError: If the row is too long, or an answer to it cannot be judged.
        """

    def describe(self) -> dict[str, Any]:
        """Return the settings that decide items beside the formats, as plain values, for the cache key."""
        limits = ("max_prompt_length", "max_length")
        return {
            "stage": f"{type(self).__module__}.{type(self).__qualname__}",
            "traces": self.trace_columns,
            "row_prompts": self.chosen.keeps_row_prompts,
            **{name: getattr(self, name) for name in limits},
        }

    # Items

    def build_problem(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> Problem:
        """Tokenise question and solution for the model that writes, and for the one that reads.

        Raises:
            BadRowError: If the row is too long.
        """
        problem = self.format.build_problem(
            number, row.question, row.solution, self.find_row_prompt(row), columns
        )
        self.require_prompt(len(problem.teacher_prompt))
        require_length(BadRowReason.TOO_LONG, longest_sequence(problem, 0, 0), self.max_length)
        return problem

    def require_prompt(self, length: int) -> None:
        """Reject a row whose prompt is too long."""
        require_length(BadRowReason.PROMPT_TOO_LONG, length, self.max_prompt_length)

    def find_row_prompt(self, row: ParsedRow) -> str | None:
        """Return the row's system prompt; None if it does not count."""
        return row.system if self.chosen.keeps_row_prompts else None

    def make_items(self, rows: Iterable[NumberedRow], report: BadRowReport) -> Iterator[dict[str, Any]]:
        """Yield the items of a source, and then the rows that are not used, as fields of a table.

        Args:
            rows: Rows as they were read.
            report: Gets the rows that are bad.
        """
        for number, columns in rows:
            try:
                if isinstance(columns, BadRowError):
                    raise columns
                columns = self.complete(columns)
                row = self.parse(columns)
                items = self.build_items(number, row, columns)
            except BadRowError as error:
                report.bad.append((number, error))
                continue
            own_prompt = self.find_row_prompt(row)
            of_row = {
                "row": number,
                "system_prompt": self.format.student_system_prompt if own_prompt is None else own_prompt,
                "content": hash_columns(columns),
            }
            for index, item in enumerate(items):
                yield {**of_row, "is_first": index == 0, **flatten_item(item)}
        for number, bad in report.bad:
            detail = escape_half_pairs(bad.detail)
            yield {"row": number, "is_first": True, "rejected": str(bad.reason), "detail": detail}

    # What a stage says of its completions

    @property
    def stop(self) -> str:
        """Return the text that ends a completion; '' if only an end-of-sequence token does."""
        return self.format.end_tag

    def build_rollout(self, problem: Problem, completion: Completion) -> Rollout:
        """Attach a completion to its problem, as the student reads it."""
        return self.format.build_rollout(problem, completion)

    def split_turn(self, rollout: Rollout) -> tuple[str, str] | None:
        """Return thought and solution of the turn that stage 4 makes of a completion.

        An explanation is the thought before the problem's solution. An answer has a thought and a solution of
        its own; None if it cannot be split into them.
        """
        return rollout.text, rollout.problem.solution

    def count_turn_tokens(self, rollout: Rollout) -> int | None:
        """Return the number of tokens of the example that stage 4 makes of a completion; None without one."""
        if (turn := self.split_turn(rollout)) is None:
            return None
        problem, (thought, solution) = rollout.problem, map(self.format.student_tags.wrap, turn)
        example = (problem.row, problem.question, thought, solution, problem.student_system_prompt)
        return len(self.format.build_student_sft_example(*example).token_ids)

    def fits_student(self, rollout: Rollout) -> bool:
        """Return whether a student can learn from a completion.

        It must have text and an end, its thought may hold no tag, and it must fit into the student's context.
        """
        turn, limit = self.split_turn(rollout), self.student_context
        if turn is None or not (rollout.closed and turn[0]):
            return False
        if find_tag(turn[0], self.format.tags, self.format.student_tags) is not None:
            return False
        if limit is None:
            return True
        length = self.count_turn_tokens(rollout)
        return length is not None and length <= limit


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
