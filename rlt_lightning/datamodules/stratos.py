"""The datamodule of all training stages: it reads rows and serves batches of tokenised items."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from rlt_lightning.datamodules.bad_rows import BadRowReport, write_reports
from rlt_lightning.datamodules.filters import Filters, Sieve
from rlt_lightning.datamodules.format_choice import (
    ChosenFormat,
    FormatOptions,
    check_shared_vocabulary,
    choose_format,
    tags_text,
)
from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.datamodules.items import Item, ItemMaker, LongTraces, Task
from rlt_lightning.datamodules.loader import OrderedLoader, StepLoader
from rlt_lightning.datamodules.preparation import make_items
from rlt_lightning.datamodules.responses import RawResponses, holds_tag, split_response
from rlt_lightning.datamodules.rows import TRACE_COLUMN
from rlt_lightning.datamodules.sources import ARITHMETIC, read_rows
from rlt_lightning.models.format import ModelFormat
from rlt_lightning.tags import TagStyle
from rlt_lightning.types import (
    Completion,
    InputError,
    Problem,
    PromptBatch,
    Rollout,
    Rollouts,
    SFTBatch,
    SFTExample,
    as_list,
)


class StratosDataModule(LightningDataModule):
    """Questions with solutions, in Bespoke-Stratos' format or in your own columns.

    `setup` reads, checks and tokenises all rows before any model is loaded. Rows that cannot be used are left
    out, counted, and listed in `data_report.json`.

    Args:
        source: "arithmetic", one kind of it such as "arithmetic:addition", or "countdown" (embedded), a
            JSONL, JSON, Parquet or CSV file, a folder, a hub id, or a list of such sources. Row numbers
            continue from one source to the next.
        split: Split of each source, where it has any.
        task: What the rows are made into: prompts for RL and generation (rlt), fine-tuning examples of the
            teacher or the student, given completions to be scored (score), or questions that the trained
            model answers without a teacher (student_rl).
        trace_columns: Columns of the traces; a row must have all of them, and becomes one item per trace.
            Scored rows name theirs as `trace_column`, unless `reasoning_trace` is the only one.
        raw: Column of a model's whole response, whose parts replace `reasoning_trace` and `solution`.
        filters: Which usable rows of `source` are left out.
        tokenizer: Name of the teacher's (or trained) model; linked from the model.
        student_tokenizer: Name of the student's model, to compare its vocabulary; linked from the model.
        tags: "stratos", "r1", or the fields of a TagStyle; None: as the models were trained, else stratos.
        teacher_system_prompt: None: as the teacher was trained, else ours; '' for none, @FILE for the text of
            a file. May hold placeholders such as {explanation_open}.
        student_system_prompt: None: as the student was trained, else the row's, else ours; '' and @FILE too.
        format_from: Source of rows off which tags and system prompt of a student from outside are read.
        force_format: Use these settings although a model records that it was trained in others.
        prompts_per_step: Rows per optimizer step, over all processes.
        max_prompt_length: Most tokens of a prompt; longer rows are left out.
        max_solution_length: Most tokens of a solution; None for no limit.
        max_length: Most tokens of a whole sequence; see `long_traces` for longer rows.
        long_traces: What fine-tuning does with longer rows: "drop" leaves them out, "truncate" keeps their
            first `max_length` tokens.
        student_context: Context of the students that learn from generated traces, tokens; None for no limit.
        val_source: Source or sources of held-out rows.
        val_split: Its split, where it has any.
        val_rows: Without `val_source`: rows of `source` that are held out by seed. With it: the most rows
            taken from it; 0 takes all.
        val_batch_size: Rows per batch of validation and prediction, over all processes; None:
            prompts_per_step.
        max_rows: Most rows read of each source, from its start.
        num_embedded_rows: Size of an embedded source.
        max_bad_frac: Part of each source's rows that may be unusable.
        seed: Decides the order, the held-out rows and the rows of embedded sources.
        output_dir: Folder of `data_report.json`; None writes none.
        trust_remote_code: Run code that comes with a tokenizer.
    """

    num_finished = 0  # items that an interrupted prediction has finished
    _prepared_for: str | None = None  # stage

    def __init__(
        self,
        source: list[str] | str = ARITHMETIC,
        split: str = "train",
        task: Task = "rlt",
        trace_columns: Sequence[str] = (TRACE_COLUMN,),
        raw: RawResponses = RawResponses(),
        filters: Filters = Filters(),
        tokenizer: str | None = None,
        student_tokenizer: str | None = None,
        tags: str | TagStyle | None = None,
        teacher_system_prompt: str | None = None,
        student_system_prompt: str | None = None,
        format_from: str | None = None,
        force_format: bool = False,
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
        self.sources, self.val_sources = as_list(source), as_list(val_source)
        self.source = ", ".join(self.sources)  # for messages
        self.split = split
        self.task: Task = task
        self.trace_columns = list(trace_columns)
        self.raw, self.filters = raw, filters
        self.tokenizer_name = tokenizer
        self.student_tokenizer_name = student_tokenizer
        self.format_options = FormatOptions(
            tags, teacher_system_prompt, student_system_prompt, format_from, force_format
        )
        self.prompts_per_step = prompts_per_step
        self.max_prompt_length = max_prompt_length
        self.max_solution_length = max_solution_length
        self.max_length = max_length
        self.long_traces: LongTraces = long_traces
        self.student_context = student_context
        self.val_split = val_split
        self.val_rows = val_rows
        self.val_batch_size = prompts_per_step if val_batch_size is None else val_batch_size
        self.max_rows = max_rows
        self.num_embedded_rows = num_embedded_rows
        self.max_bad_frac = max_bad_frac
        self.seed = seed
        self.output_dir = output_dir
        self.trust_remote_code = trust_remote_code
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
                "data.trace_columns must name columns of traces, but names completion. Name "
                f"{TRACE_COLUMN} instead: a row's completion is scored in its place."
            )
        if self.val_rows < 0:
            raise InputError(f"data.val_rows must be at least 0, but is {self.val_rows}. 0 holds none out.")
        if not 0 <= self.max_bad_frac <= 1:
            raise InputError(
                f"data.max_bad_frac must be in [0, 1], but is {self.max_bad_frac}. Set a part of the rows."
            )

    # Lightning's hooks

    def setup(self, stage: str) -> None:
        """Read, check and tokenise everything, so that bad data is reported before a model is loaded."""
        if self._prepared_for == stage:
            return
        self.chosen = self._choose_format()
        self.format = self._load_format(self.chosen)
        self._item_maker = ItemMaker(
            format=self.format,
            task=self.task,
            trace_columns=self.trace_columns,
            keep_row_prompts=self.chosen.keeps_row_prompts,
            max_prompt_length=self.max_prompt_length,
            max_solution_length=self.max_solution_length,
            max_length=self.max_length,
            long_traces=self.long_traces,
        )
        sieve = Sieve(self.filters, self._item_maker.needed_traces, self.format.tags)
        self.reports, items = self._prepare(self.sources, self.split, sieve)
        prompts = dict(self._item_maker.system_prompts)  # rows of val_source have the same numbers
        val_items: list[Item] = []
        if stage != "predict":
            if self.val_sources:
                val_reports, val_items = self._prepare(self.val_sources, self.val_split)
                val_items = val_items[: self.val_rows or None]
                self.reports += val_reports
            elif self.val_rows:
                items, val_items = self._hold_out(items)
        self.items: list[Item] = items
        self.system_prompts = Counter(prompts[item.row] for item in items)  # of the student
        self.val_items: list[Item] = val_items
        path = Path(self.output_dir) / "data_report.json" if self.output_dir else None
        if path and self._rank() == 0:
            write_reports(path, self.reports)
        for report in self.reports:
            report.check(self.max_bad_frac, path)
            for line in report.lines():
                rank_zero_warn(line + (f"; see {path}" if path else ""))
        self.chosen.check_rows(self.system_prompts)
        if stage == "validate" and not val_items:
            raise InputError(
                "rlt validate needs held-out rows, but has none. Set data.val_rows or data.val_source."
            )
        if stage == "fit":
            # Fail now if there are too few rows, or if the processes cannot share a step evenly.
            self.step_loader()
        self._prepared_for = stage

    def train_dataloader(self) -> StepLoader[Item, PromptBatch | SFTBatch]:
        """Return shuffled batches of one optimizer step, resumable in the middle of an epoch."""
        self.chosen.warn_of_guesses(self.system_prompts)
        return self.step_loader()

    def step_loader(self) -> StepLoader[Item, PromptBatch | SFTBatch]:
        """Return what `train_dataloader` returns, for those who only ask for its length."""
        rank, world_size = self._rank(), self._world_size()
        return StepLoader(self.items, self.prompts_per_step, self.collate, self.seed, rank, world_size)

    def val_dataloader(self) -> OrderedLoader[Item, PromptBatch | SFTBatch] | list[Any]:
        """Return the held-out rows in order; none without `val_source` and `val_rows`."""
        return self._ordered(self.val_items) if self.val_items else []

    def predict_dataloader(self) -> OrderedLoader[Item, PromptBatch | SFTBatch]:
        """Return all rows of the source that are not finished, in its order."""
        self.chosen.warn_of_guesses(self.system_prompts)
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
        """Return the text that ends a completion; '' if only an end-of-sequence token does."""
        return "" if self.task == "student_rl" else self.format.end_tag

    def rollout(self, problem: Problem, completion: Completion) -> Rollout:
        """Attach a completion to its problem."""
        of_student = self.task == "student_rl"
        return (self.format.student_rollout if of_student else self.format.rollout)(problem, completion)

    def turn_of(self, rollout: Rollout) -> tuple[str, str] | None:
        """Return thought and solution of the turn that stage 4 makes of a completion.

        An explanation is the thought before the problem's solution. An answer has a thought and a solution of
        its own; None if it cannot be split into them.
        """
        if self.task == "student_rl":
            return split_response(rollout.text, self.format.tags)
        return rollout.text, rollout.problem.solution

    def student_length(self, rollout: Rollout) -> int | None:
        """Return the number of tokens of the example that stage 4 makes of a completion; None without one."""
        if (turn := self.turn_of(rollout)) is None:
            return None
        problem, (thought, solution) = rollout.problem, map(self.format.student_tags.wrap, turn)
        example = (problem.row, problem.question, thought, solution, problem.student_system_prompt)
        return len(self.format.student_sft_example(*example).token_ids)

    def fits_student(self, rollout: Rollout) -> bool:
        """Return whether a student can learn from a completion.

        It must have text and an end, its thought may hold no tag, and it must fit into the student's context.
        """
        turn, limit = self.turn_of(rollout), self.student_context
        if turn is None or not (rollout.closed and turn[0]):
            return False
        if any(holds_tag(turn[0], tags) for tags in (self.format.tags, self.format.student_tags)):
            return False
        if limit is None:
            return True
        length = self.student_length(rollout)
        return length is not None and length <= limit

    def recipe(self) -> dict[str, Any]:
        """Return what the rows are and how they are presented, for a data card."""
        return {
            "source": f"{self.source} ({len(self.items)} usable rows)",
            "tags": tags_text(self.format.tags),
            "student's context": self.student_context or "no limit",
            **({"filters": filters} if (filters := self.filters.settings()) else {}),
        }

    def trained_format(self) -> ModelFormat:
        """Return the format in which this run trains its model."""
        if self.task in ("rlt", "score", "teacher_sft"):
            prompts = Counter([self.format.teacher_system_prompt])
            return ModelFormat.of_rows("teacher", self.format.tags, prompts)
        return ModelFormat.of_rows("student", self.format.student_tags, self.system_prompts)

    @property
    def problems(self) -> list[Problem]:
        """Return all problems, the held-out ones last; none in fine-tuning."""
        return [item for item in [*self.items, *self.val_items] if isinstance(item, Problem)]

    @property
    def examples(self) -> list[SFTExample]:
        """Return all examples of fine-tuning, the held-out ones last; none in other tasks."""
        return [item for item in [*self.items, *self.val_items] if isinstance(item, SFTExample)]

    # Helpers

    def _ordered(self, items: list[Item]) -> OrderedLoader[Item, PromptBatch | SFTBatch]:
        return OrderedLoader(items, self.val_batch_size, self.collate, self._rank(), self._world_size())

    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer else 0

    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def _choose_format(self) -> ChosenFormat:
        if self.tokenizer_name is None:
            raise InputError(
                "data.tokenizer must name the model whose tokenizer is used, but is not set. Set it to a "
                "folder or hub id."
            )
        learns = self.task in ("teacher_sft", "student_sft")
        if self.task in ("student_sft", "student_rl"):
            return choose_format(self.format_options, None, self.tokenizer_name, learns)
        student = None if learns else self.student_tokenizer_name
        return choose_format(self.format_options, self.tokenizer_name, student, learns)

    def _load_format(self, chosen: ChosenFormat) -> ChatFormat:
        from rlt_lightning.pretrained import load_tokenizer

        assert self.tokenizer_name is not None
        tokenizer = load_tokenizer(self.tokenizer_name, self.trust_remote_code)
        student = self.student_tokenizer_name
        if student is not None and student != self.tokenizer_name:
            student_vocabulary = load_tokenizer(student, self.trust_remote_code).get_vocab()
            check_shared_vocabulary(tokenizer.get_vocab(), student_vocabulary)
        return chosen.chat_format(tokenizer)

    def _prepare(
        self, sources: list[str], split: str, sieve: Sieve | None = None
    ) -> tuple[list[BadRowReport], list[Item]]:
        """Read sources one after another; row numbers continue from one to the next."""
        reports: list[BadRowReport] = []
        items: list[Item] = []
        first_row = 1
        for source in sources:
            rows = read_rows(source, split, self.num_embedded_rows, self.seed, self.max_rows)
            rows = self.raw.rows(rows, self.format.tags)
            report = BadRowReport(source, len(rows), first_row)
            items += make_items(rows, report, self._item_maker, sieve)
            reports.append(report)
            first_row += rows[-1][0]
        return reports, items

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


def stratos_of(trainer: Trainer) -> StratosDataModule:
    """Return a run's datamodule, which Lightning's types do not know."""
    return cast(StratosDataModule, trainer.datamodule)  # type: ignore[attr-defined]
