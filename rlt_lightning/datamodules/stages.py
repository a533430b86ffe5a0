"""The datamodule of each stage: what it makes of a row, and the settings that only this stage has.

    SFTData ─┬─ TeacherSFTData           stage 1    an example of the teacher, for each trace
             └─ StudentSFTData           stage 4    an example of the student, for each trace
    ReadData ┬─ TeacherRLData            2 and 3    a problem for the teacher, which explains the solution
             ├─ ScoringData              scoring    a problem with a given completion, for each trace
             └─ StudentLikelihoodData               a problem for the student, whose thought a model follows
                                                    with the solution
    StudentRLData                                   a problem for the student, which answers without a teacher
    StudentOPDData                       stage 4b   the same, with what a teacher sees that knows the solution

A module names the stages that it takes, `data_classes`; `rlt` proposes the first.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from typing_extensions import override

from rlt_lightning.datamodules.cross_tokenizer import load_tokenizers
from rlt_lightning.datamodules.format_choice import ChosenFormat, choose_format, require_model
from rlt_lightning.datamodules.items import longest_sequence, require_length
from rlt_lightning.datamodules.rows import (
    TRACE_COLUMN,
    ParsedRow,
    fill_solution,
    keep_columns,
    require_judgeable,
    split_response,
)
from rlt_lightning.datamodules.stratos import Rows, StratosDataModule, read_trace_columns, require_sizes
from rlt_lightning.datamodules.token_cache import Item, describe_format
from rlt_lightning.datamodules.views import TeacherViews, View
from rlt_lightning.models.format import Role
from rlt_lightning.types import (
    BadRowReason,
    Completion,
    Problem,
    PromptBatch,
    Rollout,
    Rollouts,
    SFTBatch,
    SFTExample,
)

LongTraces = Literal["drop", "truncate"]


# Fine-tuning


class SFTData(StratosDataModule, ABC):
    """Rows that become examples of fine-tuning.

    Args:
        source: The rows, with question, solution and traces; see `StratosDataModule`.
        trace_columns: Columns of the traces; a row must have all of them, and becomes one example per trace.
        max_length: Most tokens of an example; see `long_traces` for longer ones.
        long_traces: "drop" leaves rows with longer examples out, "truncate" keeps their first `max_length`
            tokens.
        common: The settings of all stages; see `StratosDataModule`.
    """

    def __init__(
        self,
        source: Rows = "chains",
        *,
        trace_columns: Sequence[str] = (TRACE_COLUMN,),
        max_length: int = 16384,
        long_traces: LongTraces = "drop",
        **common: Any,
    ) -> None:
        super().__init__(source, **common)
        require_sizes(max_length=max_length)
        self.trace_columns = read_trace_columns(trace_columns)
        self.max_length = max_length
        self.long_traces: LongTraces = long_traces

    @override
    def collate(self, items: list[Any]) -> SFTBatch:
        return SFTBatch(items)

    @override
    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "long_traces": self.long_traces}

    def shorten(self, example: SFTExample) -> SFTExample:
        """Return an example that is short enough, or reject its row."""
        if self.long_traces == "truncate" and any(example.loss_mask[: self.max_length]):
            return example.truncated(self.max_length)
        require_length(BadRowReason.TOO_LONG, len(example.token_ids), self.max_length)
        return example


class TeacherSFTData(SFTData):
    """Stage 1: the teacher learns to write the traces as its explanations."""

    role: ClassVar[Role] = "teacher"

    @override
    def choose_format(self, model: str) -> ChosenFormat:
        return choose_format(self.format_options, model, None, learns=True)

    @override
    def build_items(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> list[Item]:
        problem = self.build_problem(number, row, columns)
        traces = [row.traces[name] for name in self.trace_columns]
        return [self.shorten(self.format.build_teacher_sft_example(problem, trace)) for trace in traces]


class StudentSFTData(SFTData):
    """Stage 4: the student learns to write the traces as its thoughts, and then the solution."""

    role: ClassVar[Role] = "student"

    @override
    def choose_format(self, model: str) -> ChosenFormat:
        return choose_format(self.format_options, None, model, learns=True)

    @override
    def build_items(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> list[Item]:
        return [self._build_example(number, row, row.traces[name]) for name in self.trace_columns]

    def _build_example(self, number: int, row: ParsedRow, thought: str) -> SFTExample:
        prompt = self.find_row_prompt(row)
        example = self.format.build_student_sft_example(number, row.question, thought, row.solution, prompt)
        self.require_prompt(example.loss_mask.index(True))
        return self.shorten(example)


# Problems whose solution another model reads


class ReadData(StratosDataModule, ABC):
    """Rows that become problems whose solution a student, or a scorer, reads.

    Args:
        source: The rows, with question and solution; see `StratosDataModule`.
        student_tokenizer: Name of the model that reads, which may have another vocabulary; None: that of the
            run's module.
        max_length: Most tokens of prompt and solution, with the completion if the row brings it; longer rows
            are left out.
        common: The settings of all stages; see `StratosDataModule`.
    """

    student_reads = True

    def __init__(
        self,
        source: Rows = "chains",
        *,
        student_tokenizer: str | None = None,
        max_length: int = 16384,
        **common: Any,
    ) -> None:
        super().__init__(source, **common)
        require_sizes(max_length=max_length)
        self.reader_name = student_tokenizer
        self.max_length = max_length

    @override
    def choose_format(self, model: str) -> ChosenFormat:
        return choose_format(self.format_options, model, self.reader_name)

    @override
    def build_items(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> list[Item]:
        return [self.build_problem(number, row, columns)]


class TeacherRLData(ReadData):
    """Stages 2 and 3: a teacher explains each problem, and a student scores the explanation.

    Args:
        source: The rows, with question and solution; see `StratosDataModule`.
        student_context: Context of the students that learn from generated traces, tokens; None for no limit.
        common: See `ReadData`, and for the settings of all stages `StratosDataModule`.
    """

    role: ClassVar[Role] = "teacher"
    samples = "explanations"

    def __init__(self, source: Rows = "chains", *, student_context: int | None = None, **common: Any) -> None:
        super().__init__(source, **common)
        require_sizes(student_context=student_context)
        self.student_context = student_context


class ScoringData(ReadData):
    """Given traces or completions are scored as explanations, as if the teacher had sampled them.

    Args:
        source: The rows, with question, solution and traces; see `StratosDataModule`.
        trace_columns: Columns of the traces; a row must have all of them, and is scored once per trace.
            Scored rows name theirs as `trace_column`, unless `reasoning_trace` is the only one.
        common: See `ReadData`, and for the settings of all stages `StratosDataModule`.
    """

    role: ClassVar[Role] = "teacher"
    samples = "explanations"
    brings_completions = True

    def __init__(
        self, source: Rows = "chains", *, trace_columns: Sequence[str] = (TRACE_COLUMN,), **common: Any
    ) -> None:
        # Nothing trains on these rows, and all of them are scored.
        super().__init__(source, val_source=None, val_split="", val_rows=0, **common)
        self.trace_columns = read_trace_columns(trace_columns)

    @override
    def build_items(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> list[Item]:
        return [self._build_scored(number, row, columns, name) for name in self.trace_columns]

    def _build_scored(self, number: int, row: ParsedRow, columns: dict[str, Any], name: str) -> Problem:
        if self.trace_columns != [TRACE_COLUMN]:
            columns = {**keep_columns(columns, ["trace_column"]), "trace_column": name}
        problem = self.build_problem(number, row, columns)
        if row.completion and name == TRACE_COLUMN:
            completion = self.format.completion_from_text(problem, row.completion)
        else:
            completion = self.format.completion_from_trace(problem, row.traces[name])
        num_read = self.format.count_read_tokens(problem, completion)
        length = longest_sequence(problem, len(completion.token_ids), num_read)
        require_length(BadRowReason.TOO_LONG, length, self.max_length)
        return replace(problem, given_completion=completion)

    @override
    def collate(self, items: list[Any]) -> PromptBatch:
        rollouts = [self.build_rollout(problem, problem.given_completion) for problem in items]
        return PromptBatch(items, Rollouts(rollouts, group_size=1, policy_version=0, temperature=1.0))


class StudentLikelihoodData(ReadData):
    """The student thinks about each question, and a model reads the solution after its thought."""

    role: ClassVar[Role] = "student"
    samples = "thoughts"

    @override
    def choose_format(self, model: str) -> ChosenFormat:
        # The scorer reads in the student's format.
        return replace(choose_format(self.format_options, None, model), thinks=True)


# Questions that the student answers


class StudentRLData(StratosDataModule):
    """The student answers each question, and a judge or a reward function reads its answer.

    Args:
        source: The rows, with question and solution or answer; see `StratosDataModule`.
        student_context: Context of the students that learn from generated answers, tokens; None for no limit.
        common: The settings of all stages; see `StratosDataModule`.
    """

    role: ClassVar[Role] = "student"
    samples = "answers"
    solution_in_tags = False
    stop = ""

    def __init__(self, source: Rows = "chains", *, student_context: int | None = None, **common: Any) -> None:
        super().__init__(source, **common)
        require_sizes(student_context=student_context)
        self.student_context = student_context

    @override
    def complete(self, columns: dict[str, Any]) -> dict[str, Any]:
        return fill_solution(columns)

    @override
    def build_items(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> list[Item]:
        prompt = self.find_row_prompt(row)
        problem = self.format.build_student_problem(number, row.question, row.solution, prompt, columns)
        require_judgeable(problem.reference)
        self.require_prompt(len(problem.teacher_prompt))
        return [problem]

    @override
    def build_rollout(self, problem: Problem, completion: Completion) -> Rollout:
        return self.format.build_student_rollout(problem, completion)

    @override
    def split_turn(self, rollout: Rollout) -> tuple[str, str] | None:
        return split_response(rollout.text, self.format.tags)


class StudentOPDData(StratosDataModule):
    """Stage 4b: the student answers each question, and a teacher that sees the solution judges its tokens.

    Args:
        source: The rows, with question and solution; see `StratosDataModule`.
        teacher_tokenizer: Name of the teacher's model, which may have another vocabulary; None: that of the
            run's module.
        view: What the teacher sees: explanation or hint, see `TeacherViews`.
        common: The settings of all stages; see `StratosDataModule`.

    Attributes:
        views: The teacher's contexts; set by `load_format`.
    """

    role: ClassVar[Role] = "student"
    samples = "answers"
    teacher_reads = True
    stop = ""
    views: TeacherViews

    def __init__(
        self,
        source: Rows = "chains",
        *,
        teacher_tokenizer: str | None = None,
        view: View = "explanation",
        **common: Any,
    ) -> None:
        super().__init__(source, **common)
        self.reader_name = teacher_tokenizer
        self.view = view

    @override
    def choose_format(self, model: str) -> ChosenFormat:
        # With a hint a teacher answers as the student does, whatever it was trained for.
        teacher = self.reader_name if self.view == "explanation" else None
        return choose_format(self.format_options, teacher, model)

    @override
    def load_format(self) -> None:
        super().load_format()
        model = require_model(self.tokenizer_name)
        _, tokenizer = load_tokenizers(model, self.reader_name, self.trust_remote_code)
        teacher = self.format if tokenizer is None else self.chosen.build_format(tokenizer)
        self.views = TeacherViews(self.format, teacher, self.view)

    @override
    def list_vocabularies(self) -> list[tuple[str, Any, tuple[str, ...]]]:
        vocabularies = super().list_vocabularies()
        if self.reader_name is not None:
            vocabularies.append((self.reader_name, self.views.teacher.tokenizer, ("teacher_view",)))
        return vocabularies

    @override
    def build_items(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> list[Item]:
        problem = self.views.build_problem(number, row, self.find_row_prompt(row), columns)
        self.require_prompt(max(len(problem.teacher_prompt), len(problem.teacher_view)))
        return [problem]

    @override
    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "view": self.view,
            "teacher": describe_format(self.views.teacher),
        }

    @override
    def build_rollout(self, problem: Problem, completion: Completion) -> Rollout:
        return self.views.build_rollout(problem, completion)
