"""The datamodule of all training stages: it reads rows and serves batches of tokenised items."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from rlt_lightning.datamodules.bad_rows import BadRowReport, NumberedRow, write_reports
from rlt_lightning.datamodules.filters import Filters, RowFilter
from rlt_lightning.datamodules.format_choice import FormatOptions, describe_tags, require_model
from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.datamodules.loader import (
    ByDifficulty,
    DealtLoader,
    Difficulty,
    EpochOrder,
    OrderedLoader,
    StepLoader,
    Weighted,
    hold_out,
)
from rlt_lightning.datamodules.rows import TRACE_COLUMN, ParsedRow, RawResponses, find_tag
from rlt_lightning.datamodules.sources import (
    MemoryRows,
    Source,
    SourceReader,
    name_sources,
    parse_sources,
    parse_weights,
)
from rlt_lightning.datamodules.student_views import StudentViews
from rlt_lightning.datamodules.teacher_views import TeacherViews, ViewOptions
from rlt_lightning.datamodules.token_cache import (
    Item,
    StoredItems,
    StoredSource,
    TokenCache,
    count_system_prompts,
    find_token_folder,
    join_items,
)
from rlt_lightning.datamodules.tokenize import (
    TASKS,
    ItemLimits,
    LongTraces,
    Task,
    TaskName,
    build_keys,
    tokenize_rows,
)
from rlt_lightning.models.format import ModelFormat
from rlt_lightning.tags import TagStyle
from rlt_lightning.types import (
    BadRowError,
    Completion,
    InputError,
    Problem,
    PromptBatch,
    Rollout,
    SFTBatch,
    SFTExample,
    as_list,
)


class StratosDataModule(LightningDataModule):
    """Questions with solutions, in Bespoke-Stratos' format or in your own columns.

    `setup` reads, checks and tokenises all rows before any model is loaded. Rows that cannot be used are left
    out, counted, and listed in `data_report.json`. `data.task` names a class in `tokenize.py`, which says
    what the rows are made into.

    Args:
        source: "arithmetic", one kind of it such as "arithmetic:addition", "chains", "new_chains",
            "word_sums" or "countdown" (embedded), a JSONL, JSON, Parquet or CSV file, a folder, a hub id,
            rows themselves (a list of dictionaries or a `datasets.Dataset`), or a list of such sources, each
            with a weight or none, whose row numbers continue.
        split: Split of each source, where it has any.
        task: What the rows are made into: prompts for RL and generation (rlt), fine-tuning examples of the
            teacher or the student, given completions to be scored (score), or questions that the trained
            model answers without a teacher (student_rl) or before one that knows the solution (student_opd),
            or that it thinks about before the solution is spliced in (student_likelihood).
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
    _prepared_for: tuple[Any, ...] | None = None  # stage, tokenizers

    def __init__(
        self,
        source: str | Path | list[str] | Iterable[dict[str, Any]] = "arithmetic",
        split: str = "train",
        task: TaskName = "rlt",
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
        self.sources, self.val_sources = parse_sources(source), parse_sources(val_source)
        self.weights, self.val_weights = parse_weights(source), parse_weights(val_source)
        self.source = name_sources(source)  # for messages
        self.reader = SourceReader(split, num_embedded_rows, seed, max_rows, streaming)
        self.task: TaskName = task
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
            self.tokenizer_name, self.student_names = find_models(self.trainer)
        wanted = (stage, self.tokenizer_name, self.student_names)
        if self._prepared_for == wanted:
            return
        task = self._task = self._load_task()
        row_filter = RowFilter(self.filters, task.needed_traces, task.format.tags)
        sources = self._tokenize(self.sources, self.reader, row_filter)
        items = join_items(sources)
        val_items = items[:0]
        self.reports = [source.report for source in sources]
        if stage != "predict":
            if self.val_sources:
                val_sources = self._tokenize(self.val_sources, replace(self.reader, split=self.val_split))
                val_items = join_items(val_sources)[: self.val_rows or None]
                self.reports += [source.report for source in val_sources]
            elif self.val_rows:
                items, val_items = hold_out(items, self.val_rows, self.seed)
        self.items, self.val_items = items, val_items
        self.system_prompts = count_system_prompts(items, sources)  # of the student
        self._check_rows()
        if stage == "validate" and not val_items:
            raise InputError(
                "rlt validate needs held-out rows, but has none. Set data.val_rows or data.val_source."
            )
        if stage == "fit":
            # Fail now if there are too few rows, or if the processes cannot share a step evenly.
            self.step_loader()
            self.val_dataloader()
        self._prepared_for = wanted

    def replace_rows(
        self, rows: list[dict[str, Any]], task: TaskName, trace_columns: Sequence[str]
    ) -> StratosDataModule:
        """Return a datamodule of other rows in the same format, without held-out rows or filters."""
        found = copy(self)
        found.sources, found.val_sources, found.weights, found.order = [MemoryRows(rows)], [], [], None
        found.task, found.trace_columns, found.filters = task, list(trace_columns), Filters()
        found.reader, found.val_rows, found.max_bad_frac = replace(self.reader, max_rows=None), 0, 1.0
        found.output_dir, found._prepared_for = None, None
        return found

    def read_usable_rows(self) -> Iterator[tuple[dict[str, Any], ParsedRow]]:
        """Yield columns and texts of the source's rows that have what the task needs, after `setup`."""
        task = self._task
        for source in self.sources:
            for _, columns in self._read(source, self.reader):
                if isinstance(columns, dict):
                    with suppress(BadRowError):
                        yield columns, task.parse(columns)

    def train_dataloader(self) -> StepLoader[Item, PromptBatch | SFTBatch]:
        """Return batches of one optimizer step, resumable in the middle of an epoch."""
        self.student_views.warn_of_guesses(self.system_prompts)
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
        items, size, world_size = self.val_items, self.val_batch_size, self._world_size()
        if items and min(len(items), size) < world_size:  # Lightning refuses a loader without batches
            raise InputError(
                f"Each of the {world_size} processes needs a row to score, but there are {len(items)} in "
                f"batches of data.val_batch_size={size}. Raise both, or lower trainer.devices."
            )
        return OrderedLoader(items, size, self.collate, self._rank(), world_size) if items else []

    def predict_dataloader(self) -> DealtLoader[Item, PromptBatch | SFTBatch]:
        """Return all rows of the source that are not finished, in its order."""
        self.student_views.warn_of_guesses(self.system_prompts)
        left = self.items[self.num_finished :]
        return DealtLoader(left, self.val_batch_size, self.collate, self._rank(), self._world_size())

    def collate(self, items: list[Any]) -> PromptBatch | SFTBatch:
        """Make a batch; completions that the rows bring are attached as rollouts."""
        return self._task.build_batch(items)

    @property
    def student_views(self) -> StudentViews:
        """Return the formats in which teacher and students read."""
        return self._task.student_views

    @property
    def format(self) -> ChatFormat:
        """Return the contexts of the teacher and of the first student."""
        return self._task.format

    @property
    def views(self) -> TeacherViews | None:
        """Return what the teacher of student_opd sees; None in other tasks."""
        return self._task.views

    @property
    def stop(self) -> str:
        """Return the text that ends a completion; '' if only an end-of-sequence token does."""
        return self._task.stop

    def build_rollout(self, problem: Problem, completion: Completion) -> Rollout:
        """Attach a completion to its problem."""
        return self._task.build_rollout(problem, completion)

    def split_turn(self, rollout: Rollout) -> tuple[str, str] | None:
        """Return thought and solution of the turn that stage 4 makes of a completion; None without both."""
        return self._task.split_turn(rollout)

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

    def build_card_metadata(self) -> dict[str, Any]:
        """Return what the rows are and how they are presented, for a data card."""
        return {
            "source": f"{self.source} ({len(self.items)} usable rows)",
            "tags": describe_tags(self.format.tags),
            "student's context": self.student_context or "no limit",
            **({"filters": filters} if (filters := self.filters.list_active()) else {}),
        }

    def trained_format(self) -> ModelFormat:
        """Return the format in which this run trains its model."""
        if self._task.role == "teacher":
            prompts = Counter([self.format.teacher_system_prompt])
            return ModelFormat.from_rows("teacher", self.format.tags, prompts)
        return ModelFormat.from_rows("student", self.format.student_tags, self.system_prompts)

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

    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer else 0

    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def _load_task(self) -> Task:
        """Choose the formats, load the tokenizers, and return what turns rows into items."""
        limits = ItemLimits(
            self.max_prompt_length, self.max_solution_length, self.max_length, self.long_traces
        )
        return TASKS[self.task].load(
            self.format_options,
            require_model(self.tokenizer_name),
            self.student_names,
            self.trust_remote_code,
            self.trace_columns,
            limits,
            self.view,
        )

    def _tokenize(
        self, sources: list[Source], reader: SourceReader, row_filter: RowFilter | None = None
    ) -> list[StoredSource]:
        """Read and tokenise sources, or find them in the cache; row numbers continue from one to the next."""
        cache = TokenCache(find_token_folder(self.token_cache))
        keys = [""] * len(sources)  # without a folder nothing is looked up
        if cache.folder:
            keys = build_keys(sources, reader, self.raw, self._task, row_filter)

        found: list[StoredSource] = []
        first_row = 1
        for number, (source, key) in enumerate(zip(sources, keys, strict=True)):
            stored = cache.load(key, str(source))
            if stored is None and row_filter is not None and row_filter.finds_duplicates:
                for earlier in sources[row_filter.num_sources : number]:
                    # It was in the cache, so that the filter has not seen its rows.
                    rows = self._read(earlier, reader)
                    deque(tokenize_rows(rows, self._task, BadRowReport(str(earlier)), row_filter), maxlen=0)
            if stored is None:
                report = BadRowReport(str(source))
                rows = self._read(source, reader)
                items = tokenize_rows(rows, self._task, report, row_filter)
                stored = cache.save(key, items, report)
            stored.report.first_row = first_row
            first_row += stored.report.last_row
            found.append(stored)
        return found

    def _read(self, source: Source, reader: SourceReader) -> Iterator[NumberedRow]:
        """Read the rows of a source; a row with several whole responses becomes several."""
        return self.raw.split_rows(reader.read(source), self._task.format.tags)

    def _check_rows(self) -> None:
        """Report the rows that are not used, and stop if they are too many, or not those of the model."""
        path = Path(self.output_dir) / "data_report.json" if self.output_dir else None
        if path and self._rank() == 0:
            write_reports(path, self.reports)
        for report in self.reports:
            report.check(self.max_bad_frac, path)
            for line in report.lines():
                rank_zero_warn(line + (f"; see {path}" if path else ""))
        self._task.chosen.check_rows(self.system_prompts)


def get_stratos_data(trainer: Trainer) -> StratosDataModule:
    """Return a run's datamodule, which Lightning's types do not know."""
    return cast(StratosDataModule, trainer.datamodule)  # type: ignore[attr-defined]


# Checks of the settings, made when the datamodule is built


def require_settings(data: StratosDataModule) -> None:
    """Check the settings of a StratosDataModule.

    Raises:
        InputError: Naming the setting.
    """
    require_sizes(
        prompts_per_step=data.prompts_per_step,
        max_prompt_length=data.max_prompt_length,
        max_solution_length=data.max_solution_length,
        max_length=data.max_length,
        student_context=data.student_context,
        val_batch_size=data.val_batch_size,
        max_rows=data.reader.max_rows,
        num_embedded_rows=data.reader.num_embedded_rows,
    )
    require_trace_columns(data.trace_columns)
    require_held_out(data.val_rows, data.max_bad_frac)
    if not data.sources:
        raise InputError("data.source must name at least one source, but is an empty list. Name one.")
    if data.val_weights:
        raise InputError("Sources of data.val_source take no weights: all rows count. Name them only.")
    if data.task not in TASKS:
        raise InputError(f"data.task must be one of {', '.join(TASKS)}, but is '{data.task}'. Correct it.")
    if not TASKS[data.task].shows_teacher and data.view != ViewOptions():
        raise InputError(
            f"data.view says what the teacher of student_opd sees, but data.task is {data.task}. Leave it "
            "out, or set data.task to student_opd."
        )
    if data.weights and data.order:
        raise InputError(
            "Sources may have weights, or data.order may be set, but not both: an order by difficulty "
            "mixes the sources in its own way. Drop one."
        )


def require_sizes(**sizes: int | None) -> None:
    """Check that sizes, where they are set, are at least 1.

    Raises:
        InputError: Naming the setting.
    """
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise InputError(f"data.{name} must be at least 1, but is {size}. Raise it.")


def require_trace_columns(columns: list[str]) -> None:
    """Check that columns of traces are different ones, and no column of completions.

    Raises:
        InputError: If they are not.
    """
    if len(set(columns)) != len(columns) or not columns:
        raise InputError(
            f"data.trace_columns must name one or several different columns, but is {columns}. Change it."
        )
    if "completion" in columns:
        raise InputError(
            "data.trace_columns must name columns of traces, but names completion. Name "
            f"{TRACE_COLUMN} instead: a row's completion is scored in its place."
        )


def require_held_out(val_rows: int, max_bad_frac: float) -> None:
    """Check the number of held-out rows, and the part of rows that may be unusable.

    Raises:
        InputError: Naming the setting.
    """
    if val_rows < 0:
        raise InputError(f"data.val_rows must be at least 0, but is {val_rows}. 0 holds none out.")
    if not 0 <= max_bad_frac <= 1:
        raise InputError(
            f"data.max_bad_frac must be in [0, 1], but is {max_bad_frac}. Set a part of the rows."
        )


def find_models(trainer: Trainer) -> tuple[str | None, tuple[str, ...]]:
    """Return the names of a run's trained or evaluated model, and of the frozen ones that read for it."""
    module: Any = trainer.lightning_module
    students, teacher = getattr(module, "students", None), getattr(module, "teacher_name", None)
    frozen = students.names if students else (teacher,) if teacher else ()
    return getattr(module, "pretrained", None), frozen
