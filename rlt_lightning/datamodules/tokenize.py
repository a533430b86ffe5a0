"""Turn rows into the items of a task: problems that are sampled or scored, or examples of fine-tuning.

    read ─ row ─▶ complete ─▶ parse ─▶ filters ─▶ Task.build_items ─ MadeItem ─▶ cache     see `tokenize_rows`
                     └──────────┴─────────┴───────────────┴──▶ BadRowReport: why a row is not used

The tasks, each the value of `data.task` and a class of its own:

    rlt           one problem for the teacher, which explains the solution
    score         a problem with a given completion, for each trace
    teacher_sft   an example of the teacher, for each trace
    student_sft   an example of the student, for each trace
    student_rl    one problem for the student, which answers without a teacher
    student_opd   the same, with what a teacher sees that knows the solution
    student_likelihood   one problem for the student, whose thought a model follows with the solution

A task says which columns its rows need, what becomes of a row and of a completion, and what a batch holds.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, Self

from typing_extensions import override

from rlt_lightning.console import show_count
from rlt_lightning.datamodules.bad_rows import BadRowReport, FilterReason, NumberedRow
from rlt_lightning.datamodules.cross_tokenizer import CrossTokenizerFormat, load_tokenizers
from rlt_lightning.datamodules.filters import RowFilter
from rlt_lightning.datamodules.format_choice import (
    ChosenFormat,
    FormatOptions,
    choose_format,
    choose_formats,
    choose_thinking_format,
)
from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.datamodules.rows import (
    TRACE_COLUMN,
    ParsedRow,
    RawResponses,
    Row,
    check_columns,
    fill_solution,
    parse_row,
    require_judgeable,
    split_response,
)
from rlt_lightning.datamodules.sources import Source, SourceReader
from rlt_lightning.datamodules.student_views import StudentViews
from rlt_lightning.datamodules.teacher_views import (
    TeacherViews,
    ViewOptions,
    build_views,
    swap_solutions,
)
from rlt_lightning.datamodules.token_cache import Item, MadeItem, describe_format, hash_code, hash_value
from rlt_lightning.models.format import Role
from rlt_lightning.types import (
    BadRowError,
    BadRowReason,
    Completion,
    Problem,
    PromptBatch,
    Rollout,
    Rollouts,
    SFTBatch,
    SFTExample,
)

TaskName = Literal[
    "rlt", "teacher_sft", "student_sft", "score", "student_rl", "student_opd", "student_likelihood"
]
LongTraces = Literal["drop", "truncate"]


@dataclass(frozen=True)
class ItemLimits:
    """The most tokens that an item may have.

    Args:
        max_prompt_length: Of a prompt.
        max_solution_length: Of a solution; None for no limit.
        max_length: Of a whole sequence.
        long_traces: Whether fine-tuning drops or truncates longer sequences.
    """

    max_prompt_length: int = sys.maxsize
    max_solution_length: int | None = None
    max_length: int = sys.maxsize
    long_traces: LongTraces = "drop"

    def require_prompt(self, length: int) -> None:
        """Reject a row whose prompt is too long."""
        require_length(BadRowReason.PROMPT_TOO_LONG, length, self.max_prompt_length)

    def require_sequence(self, length: int) -> None:
        """Reject a row whose whole sequence is too long."""
        require_length(BadRowReason.TOO_LONG, length, self.max_length)

    def shorten(self, example: SFTExample) -> SFTExample:
        """Return an example that is short enough, or reject its row."""
        if self.long_traces == "truncate" and any(example.loss_mask[: self.max_length]):
            return example.truncated(self.max_length)
        self.require_sequence(len(example.token_ids))
        return example


class Task(ABC):
    """What the rows are made into; one subclass for each value of `data.task`.

    Args:
        student_views: The formats in which teacher and students read.
        trace_columns: Columns of the traces.
        limits: The most tokens of an item.

    Attributes:
        name: The value of `data.task`.
        role: The model that a run of this task trains, or whose work it scores.
        reads_traces: Whether a row must have the columns of the traces.
        takes_completions: Whether a row may have a completion in place of a trace.
        learns: Whether the items are examples of fine-tuning.
        shows_teacher: Whether a teacher sees the problem too, as `data.view` says.
        views: What the teacher of student_opd sees.
    """

    name: ClassVar[TaskName]
    role: ClassVar[Role]
    reads_traces: ClassVar[bool] = False
    takes_completions: ClassVar[bool] = False
    learns: ClassVar[bool] = False
    shows_teacher: ClassVar[bool] = False
    views: TeacherViews | None = None

    def __init__(
        self,
        student_views: StudentViews,
        trace_columns: Sequence[str] = (TRACE_COLUMN,),
        limits: ItemLimits = ItemLimits(),
    ) -> None:
        self.student_views = student_views
        self.trace_columns = list(trace_columns)
        self.limits = limits

    @classmethod
    def load(
        cls,
        options: FormatOptions,
        model: str,
        frozen: Sequence[str],
        trust_remote_code: bool,
        trace_columns: Sequence[str],
        limits: ItemLimits,
        view: ViewOptions,
    ) -> Self:
        """Choose the formats of a run, and load its tokenizers.

        Args:
            options: What the user says about the formats.
            model: Name of the trained, asked or only model.
            frozen: Names of the models that read for it.
            trust_remote_code: Run code that comes with a tokenizer.
            trace_columns: Columns of the traces.
            limits: The most tokens of an item.
            view: What the teacher of student_opd sees.

        Raises:
            InputError: If a setting contradicts what a model was trained in, or a tokenizer cannot be loaded.
        """
        formats = cls.choose_formats(options, model, frozen, view)
        students = () if cls.shows_teacher else frozen[: len(formats)]
        student_views = StudentViews(formats, model, students, trust_remote_code)
        task = cls(student_views, trace_columns, limits)
        if cls.shows_teacher:
            _, tokenizer = load_tokenizers(model, frozen[0] if frozen else None, trust_remote_code)
            task.views = build_views(formats[0], task.format, tokenizer, view)
        return task

    @classmethod
    def choose_formats(
        cls, options: FormatOptions, model: str, frozen: Sequence[str], view: ViewOptions
    ) -> list[ChosenFormat]:
        """Choose the format of each student; of a student that is trained, its own."""
        return [choose_format(options, None, model, cls.learns)]

    @property
    def format(self) -> ChatFormat:
        """Return the contexts of the teacher and of the first student."""
        return self.student_views.formats[0]

    @property
    def chosen(self) -> ChosenFormat:
        """Return how the format was chosen."""
        return self.student_views.chosen[0]

    @property
    def needed_traces(self) -> list[str]:
        """Return the columns of traces that a row must have."""
        return self.trace_columns if self.reads_traces else []

    # Rows and items

    def complete(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of a row, with what the task can tell from the others."""
        return columns

    def parse(self, columns: dict[str, Any]) -> ParsedRow:
        """Parse a row with the tags of this run.

        Raises:
            BadRowError: If it cannot be used.
        """
        tags, student_tags = self.format.tags, self.format.student_tags
        return parse_row(columns, tags, self.needed_traces, self.takes_completions, student_tags)

    def change_rows(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Return the parsed rows, with what one of them takes from others."""
        return rows

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

    def find_system_prompt(self, row: ParsedRow) -> str:
        """Return the system prompt under which the student sees a row."""
        own = self._row_prompt(row)
        return self.format.student_system_prompt if own is None else own

    def describe(self) -> dict[str, Any]:
        """Return the settings that decide items beside the formats, as plain values, for the cache key."""
        prompts = self.chosen.keeps_row_prompts
        return {"task": self.name, "traces": self.trace_columns, "row_prompts": prompts, **vars(self.limits)}

    # Batches and completions

    def build_batch(self, items: list[Any]) -> PromptBatch | SFTBatch:
        """Make a batch of items."""
        return SFTBatch(items) if self.learns else PromptBatch(items)

    @property
    def stop(self) -> str:
        """Return the text that ends a completion; '' if only an end-of-sequence token does."""
        return self.format.end_tag

    def build_rollout(self, problem: Problem, completion: Completion) -> Rollout:
        """Attach a completion to its problem, as every student reads it."""
        return self.student_views.build_rollout(problem, completion)

    def split_turn(self, rollout: Rollout) -> tuple[str, str] | None:
        """Return thought and solution of the turn that stage 4 makes of a completion.

        An explanation is the thought before the problem's solution. An answer has a thought and a solution of
        its own; None if it cannot be split into them.
        """
        return rollout.text, rollout.problem.solution

    # Helpers

    def _row_prompt(self, row: ParsedRow) -> str | None:
        return row.system if self.chosen.keeps_row_prompts else None


class RLTTask(Task):
    """A teacher explains each problem, and its students score the explanation."""

    name: ClassVar[TaskName] = "rlt"
    role: ClassVar[Role] = "teacher"

    @override
    @classmethod
    def choose_formats(
        cls, options: FormatOptions, model: str, frozen: Sequence[str], view: ViewOptions
    ) -> list[ChosenFormat]:
        return choose_formats(options, model, () if cls.learns else frozen, cls.learns)

    @override
    def build_items(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> list[Item]:
        return [self.build_problem(number, row, columns)]

    def build_problem(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> Problem:
        """Tokenise question and solution for teacher and student."""
        problem = self.format.build_problem(
            number, row.question, row.solution, self._row_prompt(row), columns
        )
        self.limits.require_prompt(len(problem.teacher_prompt))
        if self.limits.max_solution_length is not None:
            num_solution = len(problem.solution_ids)
            require_length(BadRowReason.SOLUTION_TOO_LONG, num_solution, self.limits.max_solution_length)
        self.limits.require_sequence(longest_sequence(problem, 0, 0))
        return problem


class StudentLikelihoodTask(RLTTask):
    """The student thinks about each question, and a model reads the solution after its thought."""

    name = "student_likelihood"
    role = "student"

    @override
    @classmethod
    def choose_formats(
        cls, options: FormatOptions, model: str, frozen: Sequence[str], view: ViewOptions
    ) -> list[ChosenFormat]:
        # Every scorer reads in the student's format; the first one's checks that of all.
        return [choose_thinking_format(options, model, frozen)] * max(1, len(frozen))


class ScoreTask(RLTTask):
    """Given traces or completions are scored as explanations, as if the teacher had sampled them."""

    name = "score"
    reads_traces = True
    takes_completions = True

    @override
    def build_items(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> list[Item]:
        return [self._build_scored(number, row, columns, name) for name in self.trace_columns]

    def _build_scored(self, number: int, row: ParsedRow, columns: dict[str, Any], name: str) -> Problem:
        if self.trace_columns != [TRACE_COLUMN]:
            columns = {**columns, "trace_column": name}
        problem = self.build_problem(number, row, columns)
        if row.completion and name == TRACE_COLUMN:
            completion = self.format.completion_from_text(problem, row.completion)
        else:
            completion = self.format.completion_from_trace(problem, row.traces[name])
        num_tokens = num_read = len(completion.token_ids)
        if isinstance(self.format, CrossTokenizerFormat):
            num_read = self.format.count_read_tokens(problem, completion)
        self.limits.require_sequence(longest_sequence(problem, num_tokens, num_read))
        return replace(problem, given_completion=completion)

    @override
    def build_batch(self, items: list[Any]) -> PromptBatch:
        """Make a batch with the given completions as rollouts."""
        rollouts = [self.build_rollout(problem, problem.given_completion) for problem in items]
        return PromptBatch(items, Rollouts(rollouts, group_size=1, policy_version=0, temperature=1.0))


class TeacherSFTTask(RLTTask):
    """The teacher learns to write the traces as its explanations."""

    name = "teacher_sft"
    reads_traces = True
    learns = True

    @override
    def build_items(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> list[Item]:
        problem = self.build_problem(number, row, columns)
        traces = [row.traces[name] for name in self.trace_columns]
        return [
            self.limits.shorten(self.format.build_teacher_sft_example(problem, trace)) for trace in traces
        ]


class StudentSFTTask(Task):
    """The student learns to write the traces as its thoughts, and then the solution."""

    name = "student_sft"
    role = "student"
    reads_traces = True
    learns = True

    @override
    def build_items(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> list[Item]:
        return [self._build_example(number, row, row.traces[name]) for name in self.trace_columns]

    def _build_example(self, number: int, row: ParsedRow, thought: str) -> SFTExample:
        prompt = self._row_prompt(row)
        example = self.format.build_student_sft_example(number, row.question, thought, row.solution, prompt)
        self.limits.require_prompt(example.loss_mask.index(True))
        return self.limits.shorten(example)


class StudentRLTask(Task):
    """The student answers each question, and a judge or a reward function reads its answer."""

    name = "student_rl"
    role = "student"

    @override
    def complete(self, columns: dict[str, Any]) -> dict[str, Any]:
        return fill_solution(columns)

    @override
    def build_items(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> list[Item]:
        prompt = self._row_prompt(row)
        problem = self.format.build_student_problem(number, row.question, row.solution, prompt, columns)
        require_judgeable(problem.reference)
        self.limits.require_prompt(len(problem.teacher_prompt))
        return [problem]

    @property
    @override
    def stop(self) -> str:
        return ""

    @override
    def build_rollout(self, problem: Problem, completion: Completion) -> Rollout:
        return self.format.build_student_rollout(problem, completion)

    @override
    def split_turn(self, rollout: Rollout) -> tuple[str, str] | None:
        return split_response(rollout.text, self.format.tags)


class StudentOPDTask(Task):
    """The student answers each question, and a teacher that sees the solution judges its tokens."""

    name = "student_opd"
    role = "student"
    shows_teacher = True
    views: TeacherViews

    @override
    @classmethod
    def choose_formats(
        cls, options: FormatOptions, model: str, frozen: Sequence[str], view: ViewOptions
    ) -> list[ChosenFormat]:
        # With a hint a teacher answers as the student does, whatever it was trained for.
        teacher = frozen[0] if frozen and view.kind == "explanation" else None
        return [choose_format(options, teacher, model)]

    @override
    def change_rows(self, rows: Iterator[Row]) -> Iterator[Row]:
        return swap_solutions(rows) if self.views.options.wrong_solutions else rows

    @override
    def build_items(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> list[Item]:
        shown = row.solution if row.shown is None else row.shown
        problem = self.views.build_problem(number, row, shown, self._row_prompt(row), columns)
        self.limits.require_prompt(max(len(problem.teacher_prompt), len(problem.teacher_view)))
        return [problem]

    @property
    @override
    def stop(self) -> str:
        return ""

    @override
    def build_rollout(self, problem: Problem, completion: Completion) -> Rollout:
        return self.views.build_rollout(problem, completion)


TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        *(RLTTask, ScoreTask, TeacherSFTTask),
        *(StudentSFTTask, StudentRLTask, StudentOPDTask, StudentLikelihoodTask),
    )
}


# Rows


def tokenize_rows(
    rows: Iterable[NumberedRow], task: Task, report: BadRowReport, row_filter: RowFilter | None = None
) -> Iterator[MadeItem]:
    """Yield the items of a source, and report the rows that are not used.

    Args:
        rows: Rows as they were read.
        task: Makes the items.
        report: Gets the rows that are bad or left out; it is complete after the last item.
        row_filter: The filters; None for rows that pass none.

    Raises:
        InputError: If no row has the columns that the task needs.
    """
    rows = complete_rows(rows, task, report)
    rows = check_columns(rows, report.source, task.needed_traces, task.takes_completions)
    parsed = task.change_rows(parse_rows(rows, task, report))
    if row_filter is not None:
        parsed = row_filter.filter_rows(parsed, report)
    for number, columns, row in show_count(parsed, f"tokenising {report.source}"):
        if row_filter is not None and row_filter.is_duplicate(row):
            report.filtered.append((number, FilterReason.DUPLICATE, "an earlier row is used"))
            continue
        try:
            items = task.build_items(number, row, columns)
        except BadRowError as error:
            report.add(number, error)
            continue
        prompt = task.find_system_prompt(row)
        yield from (MadeItem(item, prompt, columns) for item in items)
        if any(isinstance(item, SFTExample) and item.num_cut for item in items):
            report.truncated.append(number)
        if row_filter is not None:
            row_filter.remember(row)
    report.sort()
    if row_filter is not None:
        row_filter.num_sources += 1


def complete_rows(rows: Iterable[NumberedRow], task: Task, report: BadRowReport) -> Iterator[NumberedRow]:
    """Yield rows with what the task adds, and count them."""
    for number, columns in rows:
        report.num_rows += 1
        report.last_row = number
        yield number, columns if isinstance(columns, BadRowError) else task.complete(columns)


def parse_rows(rows: Iterable[NumberedRow], task: Task, report: BadRowReport) -> Iterator[Row]:
    """Yield the rows that can be parsed, and report the others."""
    for number, columns in rows:
        try:
            if isinstance(columns, BadRowError):
                raise columns
            texts = task.parse(columns)
        except BadRowError as error:
            report.add(number, error)
        else:
            yield number, columns, texts


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


def build_keys(
    sources: Sequence[Source],
    reader: SourceReader,
    raw: RawResponses,
    task: Task,
    row_filter: RowFilter | None = None,
) -> list[str]:
    """Return a hash of all that decides the items of each source: its key in the cache."""
    settings: dict[str, Any] = {"code": hash_code(), "raw": asdict(raw), "task": task.describe()}
    settings["format"] = describe_format(task.format)
    if task.views is not None:
        settings["views"] = [asdict(task.views.options), describe_format(task.views.teacher)]
    if row_filter is not None and row_filter.filters.list_active():
        settings["filters"] = row_filter.describe()
    keys: list[str] = []
    for source in sources:
        # A row may be the duplicate of one in an earlier source.
        earlier = keys[-1:] if row_filter is not None and row_filter.finds_duplicates else []
        keys.append(hash_value([settings, reader.fingerprint(source), earlier]))
    return keys
