"""The datamodule of all training stages: rows in, checked and tokenised problems or examples out."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from rlt_lightning.datamodules.bad_rows import BadRowError, BadRowReason, BadRowReport, Row, write_reports
from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.datamodules.items import Item, LongTraces, Task, longest_sequence, require_length
from rlt_lightning.datamodules.loader import OrderedLoader, StepLoader
from rlt_lightning.datamodules.rows import (
    TRACE_COLUMN,
    ParsedRow,
    check_columns,
    parse_row,
    require_judgeable,
    with_solution,
)
from rlt_lightning.datamodules.sources import ARITHMETIC, read_rows
from rlt_lightning.models.announce import counted
from rlt_lightning.tags import STRATOS, TagStyle
from rlt_lightning.types import (
    Completion,
    InputError,
    Problem,
    PromptBatch,
    Rollout,
    Rollouts,
    SFTBatch,
    SFTExample,
)


class StratosDataModule(LightningDataModule):
    """Questions with solutions, in Bespoke-Stratos' format or in columns of one's own.

    `setup` reads, checks and tokenises all rows before any model is loaded. Rows that cannot be used are kept
    out, counted, and listed in `data_report.json`.

    Args:
        source: "arithmetic", one kind of it such as "arithmetic:addition", or "countdown" (embedded), a
            JSONL, JSON, Parquet or CSV file, a folder, a hub id, or a list of these: they are read one after
            another, and their rows numbered through.
        split: Split of each source, where it has any.
        task: What the rows are made into: prompts for RL and generation (rlt), fine-tuning examples of the
            teacher or the student, given completions to be scored (score), or questions that the trained
            model answers alone (student_rl).
        trace_columns: Columns of the traces; a row has them all and makes an item of each. Scored rows name
            theirs as `trace_column`, unless it is `reasoning_trace` alone.
        tokenizer: Name of the teacher's (or trained) model; linked from the model.
        student_tokenizer: Name of the student's model, to compare its vocabulary; linked from the model.
        tags: "stratos", "r1", or the fields of a TagStyle.
        teacher_system_prompt: None for ours; '' for none. May hold placeholders such as {explanation_open}.
        student_system_prompt: None for the row's own, else ours; '' for none.
        prompts_per_step: Rows per optimizer step, over all processes.
        max_prompt_length: Tokens of a prompt; longer rows are kept out.
        max_solution_length: Tokens of a solution; None for no limit.
        max_length: Tokens of a whole sequence; longer rows are kept out, or as `long_traces` says.
        long_traces: What fine-tuning does with rows that are longer: "drop" keeps them out, "truncate" keeps
            their first `max_length` tokens.
        student_context: Tokens of the students that generated traces are for; None for no limit.
        val_source: Source or sources of held-out rows.
        val_split: Its split, where it has any.
        val_rows: Rows of `source` held out by seed instead, or the limit of `val_source`'s rows if above 0.
        val_batch_size: Rows per batch of validation and prediction, over all processes; None:
            prompts_per_step.
        max_rows: Rows read of each source at most, from its start.
        num_embedded_rows: Size of an embedded source.
        max_bad_frac: Part of each source's rows that may be unusable.
        seed: Of order, held-out rows and embedded sources.
        output_dir: Folder of `data_report.json`; None writes none.
        trust_remote_code: Run code that comes with a tokenizer.
    """

    def __init__(
        self,
        source: list[str] | str = ARITHMETIC,
        split: str = "train",
        task: Task = "rlt",
        trace_columns: Sequence[str] = (TRACE_COLUMN,),
        tokenizer: str | None = None,
        student_tokenizer: str | None = None,
        tags: str | TagStyle = "stratos",
        teacher_system_prompt: str | None = None,
        student_system_prompt: str | None = None,
        prompts_per_step: int = 16,
        max_prompt_length: int = 16384,
        max_solution_length: int | None = None,
        max_length: int = 16384,
        long_traces: LongTraces = "drop",
        student_context: int | None = None,
        val_source: list[str] | str | None = None,
        val_split: str = "test",
        val_rows: int = 0,
        val_batch_size: int | None = None,
        max_rows: int | None = None,
        num_embedded_rows: int = 1000,
        max_bad_frac: float = 0.01,
        seed: int = 0,
        output_dir: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        self.sources = as_list(source)
        self.source = ", ".join(self.sources)  # for messages
        self.split = split
        self.task: Task = task
        self.trace_columns = list(trace_columns)
        self.tokenizer_name = tokenizer
        self.student_tokenizer_name = student_tokenizer
        self.tags = tags
        self.teacher_system_prompt = teacher_system_prompt
        self.student_system_prompt = student_system_prompt
        self.prompts_per_step = prompts_per_step
        self.max_prompt_length = max_prompt_length
        self.max_solution_length = max_solution_length
        self.max_length = max_length
        self.long_traces: LongTraces = long_traces
        self.student_context = student_context
        self.val_sources = as_list(val_source)
        self.val_split = val_split
        self.val_rows = val_rows
        self.val_batch_size = prompts_per_step if val_batch_size is None else val_batch_size
        self.max_rows = max_rows
        self.num_embedded_rows = num_embedded_rows
        self.max_bad_frac = max_bad_frac
        self.seed = seed
        self.output_dir = output_dir
        self.trust_remote_code = trust_remote_code
        self.num_finished = 0  # items that an interrupted prediction is done with
        self._prepared_for: str | None = None  # stage
        self._check_arguments()

    def _check_arguments(self) -> None:
        sizes = {
            "prompts_per_step": self.prompts_per_step,
            "max_prompt_length": self.max_prompt_length,
            "max_solution_length": self.max_solution_length,
            "max_length": self.max_length,
            "student_context": self.student_context,
            "val_batch_size": self.val_batch_size,
            "max_rows": self.max_rows,
            "num_embedded_rows": self.num_embedded_rows,
        }
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise InputError(f"data.{name} must be at least 1, but is {size}. Raise it.")
        if not self.sources:
            raise InputError("data.source must name at least one source, but is an empty list. Name one.")
        if len(set(self.trace_columns)) != len(self.trace_columns) or not self.trace_columns:
            raise InputError(
                "data.trace_columns must name one or several different columns, but is "
                f"{self.trace_columns}. Change it."
            )
        if "completion" in self.trace_columns:
            raise InputError(
                f"data.trace_columns must name columns of traces, but names completion, which is scored for "
                f"{TRACE_COLUMN} where a row has it. Name {TRACE_COLUMN} instead."
            )
        if self.val_rows < 0:
            raise InputError(f"data.val_rows must be at least 0, but is {self.val_rows}. 0 holds none out.")
        if not 0 <= self.max_bad_frac <= 1:
            raise InputError(
                f"data.max_bad_frac must be in [0, 1], but is {self.max_bad_frac}. It is a part of the rows."
            )

    # Lightning's hooks

    def setup(self, stage: str) -> None:
        """Read, check and tokenise everything; nothing is left to fail once a model is loaded."""
        if self._prepared_for == stage:
            return
        self.format = self._load_format()
        self.reports, items = self._prepare(self.sources, self.split)
        val_items: list[Item] = []
        if stage != "predict":
            if self.val_sources:
                val_reports, val_items = self._prepare(self.val_sources, self.val_split)
                val_items = val_items[: self.val_rows or None]
                self.reports += val_reports
            elif self.val_rows:
                items, val_items = self._hold_out(items)
        self.items: list[Item] = items
        self.val_items: list[Item] = val_items
        path = Path(self.output_dir) / "data_report.json" if self.output_dir else None
        if path and self._rank() == 0:
            write_reports(path, self.reports)
        for report in self.reports:
            report.check(self.max_bad_frac, path)
            for line in report.lines():
                rank_zero_warn(line + (f"; see {path}" if path else ""))
        if stage == "fit":
            self.train_dataloader()  # says now whether a step's rows can be had and shared out
        self._prepared_for = stage

    def train_dataloader(self) -> StepLoader[Item, PromptBatch | SFTBatch]:
        """Shuffled batches of one optimizer step, resumable in the middle of an epoch."""
        rank, world_size = self._rank(), self._world_size()
        return StepLoader(self.items, self.prompts_per_step, self.collate, self.seed, rank, world_size)

    def val_dataloader(self) -> OrderedLoader[Item, PromptBatch | SFTBatch] | list[Any]:
        """The held-out rows in order; none without `val_source` and `val_rows`."""
        return self._ordered(self.val_items) if self.val_items else []

    def predict_dataloader(self) -> OrderedLoader[Item, PromptBatch | SFTBatch]:
        """All rows of the source that are not finished, in its order."""
        return self._ordered(self.items[self.num_finished :])

    def collate(self, items: list[Any]) -> PromptBatch | SFTBatch:
        """Make a batch; completions that the rows bring are attached as rollouts."""
        if self.task in ("teacher_sft", "student_sft"):
            return SFTBatch(items)
        if self.task in ("rlt", "student_rl"):
            return PromptBatch(items)
        rollouts = [self.rollout(problem, problem.given_completion) for problem in items]
        return PromptBatch(items, Rollouts(rollouts, group_size=1, policy_version=0, temperature=1.0))

    @property
    def stop(self) -> str:
        """The text in which a completion ends; '' where it ends with an end-of-sequence token alone."""
        return "" if self.task == "student_rl" else self.format.end_tag

    def rollout(self, problem: Problem, completion: Completion) -> Rollout:
        """Attach a completion to its problem."""
        of_student = self.task == "student_rl"
        return (self.format.student_rollout if of_student else self.format.rollout)(problem, completion)

    def student_length(self, rollout: Rollout) -> int:
        """Tokens of the example that stage 4 makes of an explanation."""
        problem, wrap = rollout.problem, self.format.tags.wrap
        thought, solution = wrap(rollout.text), wrap(problem.solution)
        turn = (problem.row, problem.question, thought, solution, problem.student_system_prompt)
        return len(self.format.student_sft_example(*turn).token_ids)

    def fits_student(self, rollout: Rollout) -> bool:
        """Whether a student can learn from an explanation: text, an end, no tag inside, not too long."""
        text, limit = rollout.text, self.student_context
        if not (rollout.closed and text) or self.format.tags.occur_in(text) or STRATOS.occur_in(text):
            return False
        return limit is None or self.student_length(rollout) <= limit

    def recipe(self) -> dict[str, Any]:
        """What the rows are and how they are presented, for a data card."""
        return {
            "source": f"{self.source} ({len(self.items)} usable rows)",
            "tags": self.tags if isinstance(self.tags, str) else "of its own",
            "student's context": self.student_context or "no limit",
        }

    @property
    def problems(self) -> list[Problem]:
        """All problems, the held-out ones last; empty in fine-tuning."""
        return [item for item in [*self.items, *self.val_items] if isinstance(item, Problem)]

    @property
    def examples(self) -> list[SFTExample]:
        """All examples of fine-tuning, the held-out ones last; empty otherwise."""
        return [item for item in [*self.items, *self.val_items] if isinstance(item, SFTExample)]

    # Helpers

    def _ordered(self, items: list[Item]) -> OrderedLoader[Item, PromptBatch | SFTBatch]:
        return OrderedLoader(items, self.val_batch_size, self.collate, self._rank(), self._world_size())

    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer else 0

    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def _load_format(self) -> ChatFormat:
        from rlt_lightning.pretrained import load_tokenizer

        if self.tokenizer_name is None:
            raise InputError(
                "data.tokenizer must name the model whose tokenizer is used, but is not set. Set it to a "
                "folder or hub id."
            )
        tokenizer = load_tokenizer(self.tokenizer_name, self.trust_remote_code)
        student = self.student_tokenizer_name
        if student is not None and student != self.tokenizer_name:
            student_vocabulary = load_tokenizer(student, self.trust_remote_code).get_vocab()
            check_shared_vocabulary(tokenizer.get_vocab(), student_vocabulary)
        return ChatFormat(tokenizer, self.tags, self.teacher_system_prompt, self.student_system_prompt)

    def _prepare(self, sources: list[str], split: str) -> tuple[list[BadRowReport], list[Item]]:
        """Read sources one after another; their rows are numbered through."""
        reports: list[BadRowReport] = []
        items: list[Item] = []
        first_row = 1
        for source in sources:
            rows = read_rows(source, split, self.num_embedded_rows, self.seed, self.max_rows)
            report = BadRowReport(source, len(rows), first_row)
            items += self._make_items(rows, report)
            reports.append(report)
            first_row += rows[-1][0]
        return reports, items

    def _make_items(self, rows: list[Row], report: BadRowReport) -> list[Item]:
        """Make the usable rows of a source into items, and report the others."""
        if self.task == "student_rl":
            rows = [(number, with_solution(columns)) for number, columns in rows]
        needed = [] if self.task in ("rlt", "student_rl") else self.trace_columns
        allows_completion = self.task == "score"
        check_columns(rows, report.source, needed, allows_completion)
        items: list[Item] = []
        for number, columns in counted(rows, f"tokenising {report.source}"):
            try:
                if isinstance(columns, BadRowError):
                    raise columns
                parsed = parse_row(columns, self.format.tags, needed, allows_completion)
                made = self._items_of(report.first_row - 1 + number, parsed, columns)
                items += made
                if any(isinstance(item, SFTExample) and item.num_cut for item in made):
                    report.truncated.append(number)
            except BadRowError as error:
                report.add(number, error)
        return items

    def _items_of(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> list[Item]:
        """Make one item of a row, or one for each of its traces."""
        if self.task == "rlt":
            return [self._problem(number, row, columns)]
        if self.task == "student_rl":
            return [self._student_problem(number, row, columns)]
        makers: dict[Task, Callable[[int, ParsedRow, dict[str, Any], str], Item]] = {
            "score": self._scored_problem,
            "teacher_sft": self._teacher_example,
            "student_sft": self._student_example,
        }
        return [makers[self.task](number, row, columns, name) for name in self.trace_columns]

    def _student_problem(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> Problem:
        system = self._student_prompt(row)
        problem = self.format.student_problem(number, row.question, row.solution, system, columns)
        require_judgeable(problem.reference)
        require_length(BadRowReason.PROMPT_TOO_LONG, len(problem.teacher_prompt), self.max_prompt_length)
        return problem

    def _problem(self, number: int, row: ParsedRow, columns: dict[str, Any]) -> Problem:
        problem = self.format.problem(number, row.question, row.solution, self._student_prompt(row), columns)
        require_length(BadRowReason.PROMPT_TOO_LONG, len(problem.teacher_prompt), self.max_prompt_length)
        if self.max_solution_length is not None:
            num_solution = len(problem.solution_ids)
            require_length(BadRowReason.SOLUTION_TOO_LONG, num_solution, self.max_solution_length)
        require_length(BadRowReason.TOO_LONG, longest_sequence(problem, 0), self.max_length)
        return problem

    def _scored_problem(self, number: int, row: ParsedRow, columns: dict[str, Any], name: str) -> Problem:
        if self.trace_columns != [TRACE_COLUMN]:
            columns = {**columns, "trace_column": name}
        problem = self._problem(number, row, columns)
        if row.completion and name == TRACE_COLUMN:
            completion = self.format.completion_from_text(problem, row.completion)
        else:
            completion = self.format.completion_from_trace(problem, row.traces[name])
        num_tokens = len(completion.token_ids)
        require_length(BadRowReason.TOO_LONG, longest_sequence(problem, num_tokens), self.max_length)
        return replace(problem, given_completion=completion)

    def _teacher_example(self, number: int, row: ParsedRow, columns: dict[str, Any], name: str) -> SFTExample:
        problem = self._problem(number, row, columns)
        return self._short_enough(self.format.teacher_sft_example(problem, row.traces[name]))

    def _student_example(self, number: int, row: ParsedRow, columns: dict[str, Any], name: str) -> SFTExample:
        prompt, thought = self._student_prompt(row), row.traces[name]
        example = self.format.student_sft_example(number, row.question, thought, row.solution, prompt)
        num_prompt = example.loss_mask.index(True)
        require_length(BadRowReason.PROMPT_TOO_LONG, num_prompt, self.max_prompt_length)
        return self._short_enough(example)

    def _short_enough(self, example: SFTExample) -> SFTExample:
        if self.long_traces == "truncate" and any(example.loss_mask[: self.max_length]):
            return example.truncated(self.max_length)
        require_length(BadRowReason.TOO_LONG, len(example.token_ids), self.max_length)
        return example

    def _student_prompt(self, row: ParsedRow) -> str | None:
        """The row's own system prompt, unless the user has set one for all rows."""
        return row.system if self.student_system_prompt is None else None

    def _hold_out(self, items: list[Item]) -> tuple[list[Item], list[Item]]:
        """Split rows by seed into training and held-out ones, both in the source's order."""
        rows = list(dict.fromkeys(item.row for item in items))
        if self.val_rows >= len(rows):
            raise InputError(
                f"data.val_rows must be below the number of usable rows, but is {self.val_rows} of "
                f"{len(rows)}. Lower it, or set data.val_source."
            )
        held_out = set(random.Random(f"held out {self.seed}").sample(rows, self.val_rows))
        train = [item for item in items if item.row not in held_out]
        return train, [item for item in items if item.row in held_out]


def as_list(sources: list[str] | str | None) -> list[str]:
    """Return no, one or several sources as a list."""
    return [sources] if isinstance(sources, str) else list(sources or [])


def check_shared_vocabulary(teacher: dict[str, int], student: dict[str, int]) -> None:
    """Check that every token of the teacher has the same id in the student's vocabulary.

    Raises:
        InputError: Naming the first token that differs.
    """
    if teacher.items() <= student.items():
        return
    differing = [token for token, token_id in teacher.items() if student.get(token) != token_id]
    token = min(differing, key=teacher.__getitem__)
    raise InputError(
        "Teacher and student must share a vocabulary, since explanations pass between them as token ids, but "
        f"{len(differing)} of the teacher's {len(teacher)} tokens differ, the first being {token!r} (teacher "
        f"{teacher[token]}, student {student.get(token)}). Choose models of one family, such as Qwen2.5."
    )


def stratos_of(trainer: Trainer) -> StratosDataModule:
    """Return a run's datamodule, which Lightning's types do not know."""
    return cast(StratosDataModule, trainer.datamodule)  # type: ignore[attr-defined]
