"""The datamodule of all training stages: it reads rows and serves batches of tokenised items."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from rlt_lightning.datamodules.bad_rows import write_reports
from rlt_lightning.datamodules.filters import Filters, Sieve
from rlt_lightning.datamodules.format_choice import (
    ChosenFormat,
    FormatOptions,
    choose_format,
    choose_formats,
    require_model,
    tags_text,
)
from rlt_lightning.datamodules.items import ItemMaker, LongTraces, Task
from rlt_lightning.datamodules.loader import OrderedLoader, StepLoader
from rlt_lightning.datamodules.orders import ByDifficulty, Difficulty, EpochOrder, Weighted, hold_out
from rlt_lightning.datamodules.preparation import Preparation
from rlt_lightning.datamodules.readers import Readers
from rlt_lightning.datamodules.responses import RawResponses, holds_tag, split_response
from rlt_lightning.datamodules.retelling import tokenizers_of
from rlt_lightning.datamodules.rows import TRACE_COLUMN
from rlt_lightning.datamodules.settings import models_of, require_settings
from rlt_lightning.datamodules.sources import (
    Reading,
    Source,
    names_of,
    sources_of,
    weights_of,
)
from rlt_lightning.datamodules.stored import Item, StoredItems
from rlt_lightning.datamodules.token_cache import (
    TokenCache,
    Tokenised,
    items_of,
    system_prompts_of,
    token_folder,
)
from rlt_lightning.datamodules.views import TeacherViews, ViewOptions, views_of
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
            JSONL, JSON, Parquet or CSV file, a folder, a hub id, rows themselves (a list of dictionaries or
            a `datasets.Dataset`), or a list of such sources, each with a weight or none, whose row numbers
            continue.
        split: Split of each source, where it has any.
        task: What the rows are made into: prompts for RL and generation (rlt), fine-tuning examples of the
            teacher or the student, given completions to be scored (score), or questions that the trained
            model answers without a teacher (student_rl) or before one that knows the solution (student_opd).
        trace_columns: Columns of the traces; a row must have all of them, and becomes one item per trace.
            Scored rows name theirs as `trace_column`, unless `reasoning_trace` is the only one.
        raw: Column of a model's whole response, whose parts replace `reasoning_trace` and `solution`.
        filters: Which usable rows of `source` are left out.
        tokenizer: Name of the teacher's (or trained) model; None: that of the run's module.
        student_tokenizer: Name of the student's model, which may have another vocabulary, or of several
            students' models; None likewise.
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
        order: An order of training by difficulty; None: a new random order every epoch.
        streaming: Read data sets of the hub row by row, with max_rows only those, and do not download them
            first.
        view: What the teacher of student_opd sees.
        token_cache: Folder in which tokenised rows are kept for the other processes and for later starts.
            True: a folder of the user's cache; False: none, and every process keeps its own in memory.
    """

    num_finished = 0  # items that an interrupted prediction has finished
    views: TeacherViews | None = None  # what the teacher of student_opd sees
    _prepared_for: tuple[Any, ...] | None = None  # stage, tokenizers

    def __init__(
        self,
        source: str | Path | list[str] | Iterable[dict[str, Any]] = "arithmetic",
        split: str = "train",
        task: Task = "rlt",
        trace_columns: Sequence[str] = (TRACE_COLUMN,),
        raw: RawResponses = RawResponses(),
        filters: Filters = Filters(),
        tokenizer: str | None = None,
        student_tokenizer: str | list[str] | None = None,
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
        val_source: str | Path | list[str] | Iterable[dict[str, Any]] | None = None,
        val_split: str = "test",
        val_rows: int = 0,
        val_batch_size: int | None = None,
        max_rows: int | None = None,
        num_embedded_rows: int = 1000,
        max_bad_frac: float = 0.01,
        seed: int = 0,
        output_dir: str | None = None,
        trust_remote_code: bool = False,
        order: Difficulty | None = None,
        streaming: bool = False,
        token_cache: bool | str = True,
        view: ViewOptions = ViewOptions(),
    ) -> None:
        super().__init__()
        self.sources, self.val_sources = sources_of(source), sources_of(val_source)
        self.weights, self.val_weights = weights_of(source), weights_of(val_source)
        self.source = names_of(source)  # for messages
        self.reading = Reading(split, num_embedded_rows, seed, max_rows, streaming)
        self.task: Task = task
        self.trace_columns = list(trace_columns)
        self.raw, self.filters = raw, filters
        self.follows_module = tokenizer is None
        self.tokenizer_name, self.student_names = tokenizer, tuple(as_list(student_tokenizer))
        self.format_options = FormatOptions(
            tags, teacher_system_prompt, student_system_prompt, format_from, force_format
        )
        self.prompts_per_step = prompts_per_step
        self.max_prompt_length, self.max_solution_length = max_prompt_length, max_solution_length
        self.max_length, self.student_context = max_length, student_context
        self.long_traces: LongTraces = long_traces
        self.val_split, self.val_rows = val_split, val_rows
        self.val_batch_size = prompts_per_step if val_batch_size is None else val_batch_size
        self.max_bad_frac, self.seed = max_bad_frac, seed
        self.output_dir, self.trust_remote_code = output_dir, trust_remote_code
        self.order, self.token_cache = order, token_cache
        self.view = view
        require_settings(self)

    # Lightning's hooks

    def prepare_data(self) -> None:
        """Tokenise in one process of each node; the others wait, and then map what it has written."""
        if self.token_cache is not False and self.trainer is not None and self.trainer.state.fn is not None:
            self.setup(self.trainer.state.fn)

    def setup(self, stage: str) -> None:
        """Read, check and tokenise everything, so that bad data is reported before a model is loaded."""
        if self.follows_module and self.trainer is not None:
            self.tokenizer_name, self.student_names = models_of(self.trainer)
        wanted = (stage, self.tokenizer_name, self.student_names)
        if self._prepared_for == wanted:
            return
        formats, name = self._choose_formats(), require_model(self.tokenizer_name)
        students = () if self.task == "student_opd" else self.student_names[: len(formats)]
        self.readers = Readers(formats, name, students, self.trust_remote_code)
        self.chosen, self.format = formats[0], self.readers.formats[0]
        if self.task == "student_opd":
            teacher = self.student_names[0] if self.student_names else None
            tokenizers = tokenizers_of(name, teacher, self.trust_remote_code)
            self.views = views_of(self.chosen, self.format, tokenizers[1], self.view)
        self._item_maker = ItemMaker(
            format=self.format,
            task=self.task,
            trace_columns=self.trace_columns,
            keep_row_prompts=self.chosen.keeps_row_prompts,
            max_prompt_length=self.max_prompt_length,
            max_solution_length=self.max_solution_length,
            max_length=self.max_length,
            long_traces=self.long_traces,
            views=self.views,
        )
        sieve = Sieve(self.filters, self._item_maker.needed_traces, self.format.tags)
        parts = self._tokenised(self.sources, self.reading, sieve)
        items = items_of(parts)
        val_items = items[:0]
        self.reports = [part.report for part in parts]
        if stage != "predict":
            if self.val_sources:
                val_parts = self._tokenised(self.val_sources, replace(self.reading, split=self.val_split))
                val_items = items_of(val_parts)[: self.val_rows or None]
                self.reports += [part.report for part in val_parts]
            elif self.val_rows:
                items, val_items = hold_out(items, self.val_rows, self.seed)
        self.items, self.val_items = items, val_items
        self.system_prompts = system_prompts_of(items, parts)  # of the student
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
        self._prepared_for = wanted

    def train_dataloader(self) -> StepLoader[Item, PromptBatch | SFTBatch]:
        """Return batches of one optimizer step, resumable in the middle of an epoch."""
        self.readers.warn_of_guesses(self.system_prompts)
        return self.step_loader()

    def step_loader(self) -> StepLoader[Item, PromptBatch | SFTBatch]:
        """Return what `train_dataloader` returns, for those who only ask for its length."""
        order: EpochOrder | None = None
        if self.weights:
            order = Weighted(self.items.sources, self.weights, self.seed)
        elif self.order:
            order = ByDifficulty(self.items, self.order, self.seed)
        share = (self.seed, self._rank(), self._world_size(), order)
        return StepLoader(self.items, self.prompts_per_step, self.collate, *share)

    def val_dataloader(self) -> OrderedLoader[Item, PromptBatch | SFTBatch] | list[Any]:
        """Return the held-out rows in order; none without `val_source` and `val_rows`."""
        return self._ordered(self.val_items) if self.val_items else []

    def predict_dataloader(self) -> OrderedLoader[Item, PromptBatch | SFTBatch]:
        """Return all rows of the source that are not finished, in its order."""
        self.readers.warn_of_guesses(self.system_prompts)
        return self._ordered(self.items[self.num_finished :])

    def collate(self, items: list[Any]) -> PromptBatch | SFTBatch:
        """Make a batch; completions that the rows bring are attached as rollouts."""
        if self.task in ("teacher_sft", "student_sft"):
            return SFTBatch(items)
        if self.task != "score":
            return PromptBatch(items)
        rollouts = [self.rollout(problem, problem.given_completion) for problem in items]
        return PromptBatch(items, Rollouts(rollouts, group_size=1, policy_version=0, temperature=1.0))

    @property
    def stop(self) -> str:
        """Return the text that ends a completion; '' if only an end-of-sequence token does."""
        return "" if self.task in ("student_rl", "student_opd") else self.format.end_tag

    def rollout(self, problem: Problem, completion: Completion) -> Rollout:
        """Attach a completion to its problem."""
        if self.views is not None:
            return self.views.rollout(problem, completion)
        if self.task == "student_rl":
            return self.format.student_rollout(problem, completion)
        return self.readers.with_views(self.format.rollout(problem, completion))

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
    def all_items(self) -> StoredItems:
        """Return the items of all rows, the held-out ones last."""
        return self.items + self.val_items

    @property
    def problems(self) -> Sequence[Problem]:
        """Return all problems, the held-out ones last; none in fine-tuning."""
        items = self.all_items
        return cast(Sequence[Problem], items[:0] if items.is_examples else items)

    @property
    def examples(self) -> Sequence[SFTExample]:
        """Return all examples of fine-tuning, the held-out ones last; none in other tasks."""
        items = self.all_items
        return cast(Sequence[SFTExample], items if items.is_examples else items[:0])

    # Helpers

    def _ordered(self, items: Sequence[Item]) -> OrderedLoader[Item, PromptBatch | SFTBatch]:
        return OrderedLoader(items, self.val_batch_size, self.collate, self._rank(), self._world_size())

    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer else 0

    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def _choose_formats(self) -> list[ChosenFormat]:
        tokenizer = require_model(self.tokenizer_name)
        if self.task == "student_opd":
            # With a hint a teacher answers as the student does, whatever it was trained for.
            explains = self.student_names and self.view.kind == "explanation"
            teacher = self.student_names[0] if explains else None
            return [choose_format(self.format_options, teacher, tokenizer)]
        learns = self.task in ("teacher_sft", "student_sft")
        if self.task in ("student_sft", "student_rl"):
            return [choose_format(self.format_options, None, tokenizer, learns)]
        return choose_formats(self.format_options, tokenizer, () if learns else self.student_names, learns)

    def _tokenised(
        self, sources: list[Source], reading: Reading, sieve: Sieve | None = None
    ) -> list[Tokenised]:
        """Return what became of sources; row numbers continue from one to the next."""
        cache = TokenCache(token_folder(self.token_cache))
        return Preparation(sources, reading, self.raw, self._item_maker, cache, sieve).tokenised()


def stratos_of(trainer: Trainer) -> StratosDataModule:
    """Return a run's datamodule, which Lightning's types do not know."""
    return cast(StratosDataModule, trainer.datamodule)  # type: ignore[attr-defined]
