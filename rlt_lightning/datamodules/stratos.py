"""The base class of all stages' datamodules: their settings, their sources, and the loaders.

sources ─▶ rows ─▶ `make_items` (items.py) ─▶ table, or an earlier run's ─▶ loaders ─▶ `collate`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from rlt_lightning.datamodules.bad_rows import BadRowReport, write_reports
from rlt_lightning.datamodules.format_choice import FormatOptions, describe_tags, require_model
from rlt_lightning.datamodules.items import ItemMaker
from rlt_lightning.datamodules.loader import DealtLoader, OrderedLoader, StepLoader, hold_out
from rlt_lightning.datamodules.rows import TRACE_COLUMN
from rlt_lightning.datamodules.sources import Source, SourceReader, parse_sources
from rlt_lightning.datamodules.token_cache import (
    Item,
    StoredItems,
    build_table,
    describe_format,
    hash_value,
    list_versions,
    read_reports,
)
from rlt_lightning.models.format import ModelFormat
from rlt_lightning.models.load import count_ids, require_model_name
from rlt_lightning.run.ranks import ask_callbacks
from rlt_lightning.tags import TagStyle
from rlt_lightning.types import InputError, Problem, PromptBatch, SFTBatch

# The columns of items that the trained model reads.
TRAINED_COLUMNS = ("token_ids", "teacher_prefix", "think_prefix", "completion_ids")
# Those that a student reads.
READ_COLUMNS = ("student_prefix", "student_suffix", "solution_ids")
# A file, folder, hub id or embedded task, rows themselves, or a list of such sources.
Rows = str | Path | list[str] | Iterable[dict[str, Any]]


class StratosDataModule(LightningDataModule, ItemMaker):
    """Questions with solutions, in Bespoke-Stratos' format or in your own columns.

    `setup` reads, checks and tokenises all rows before any model is loaded. Rows that cannot be used are left
    out, counted, and listed in `data_report.json`.

    Args:
        source: "chains", "new_chains", "word_sums" or "countdown" (embedded), a JSONL, JSON, Parquet or CSV
            file, a folder, a hub id, rows themselves (a list of dictionaries or a `datasets.Dataset`), or a
            list of such sources, whose row numbers continue.
        split: Split of each source, where it has any.
        tokenizer: Name of the trained model; None: that of the run's module.
        tags: "stratos", "r1", or the fields of a TagStyle; None: as the models were trained, else stratos.
        teacher_system_prompt: None: as the teacher was trained, else ours; '' for none. May hold placeholders
            such as {explanation_open}.
        student_system_prompt: None: as the student was trained, else the row's, else ours; '' for none.
        force_format: Use these settings although a model records that it was trained in others.
        prompts_per_step: Rows per optimizer step, over all processes.
        max_prompt_length: Most tokens of a prompt; longer rows are left out.
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

    Attributes:
        items: The items of all rows but the held-out ones; set by `setup`, like the next.
        val_items: The held-out ones.
    """

    _prepared_for: tuple[Any, ...] | None = None  # stage, tokenizers

    def __init__(
        self,
        source: Rows = "chains",
        split: str = "train",
        tokenizer: str | None = None,
        tags: str | TagStyle | None = None,
        teacher_system_prompt: str | None = None,
        student_system_prompt: str | None = None,
        force_format: bool = False,
        prompts_per_step: int = 16,
        max_prompt_length: int = 16384,
        val_source: Rows | None = None,
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
        self.sources, self.val_sources = parse_sources(source), parse_sources(val_source)
        self.source = ", ".join(map(str, self.sources))  # for messages
        self.reader = SourceReader(split, num_embedded_rows, seed, max_rows)
        self.trace_columns: list[str] = []
        self.follows_module = tokenizer is None
        self.tokenizer_name = tokenizer
        self.format_options = FormatOptions(tags, teacher_system_prompt, student_system_prompt, force_format)
        self.prompts_per_step, self.max_prompt_length = prompts_per_step, max_prompt_length
        self.val_split, self.val_rows = val_split, val_rows
        self.val_batch_size = prompts_per_step if val_batch_size is None else val_batch_size
        self.max_bad_frac, self.seed = max_bad_frac, seed
        self.output_dir, self.trust_remote_code = output_dir, trust_remote_code
        require_settings(self)

    # Lightning's hooks

    def setup(self, stage: str) -> None:
        """Read, check and tokenise everything, so that bad data is reported before a model is loaded."""
        if self.trainer is not None:
            module: Any = self.trainer.lightning_module
            if hasattr(module, "require_data"):
                module.require_data(self)
            if self.follows_module:
                self.tokenizer_name, self.reader_name = find_models(self.trainer.lightning_module)
        wanted = (stage, self.tokenizer_name, self.reader_name)
        if self._prepared_for == wanted:
            return
        self.require_files()
        self.load_format()
        items, self.reports = self._tokenize(self.sources, self.reader)
        val_items = items[:0]
        if stage != "predict":
            if self.val_sources:
                reader = replace(self.reader, split=self.val_split)
                val_items, reports = self._tokenize(self.val_sources, reader)
                val_items = val_items[: self.val_rows or None]
                self.reports += reports
            elif self.val_rows:
                items, val_items = hold_out(items, self.val_rows, self.seed)
        self.items, self.val_items = items, val_items
        self.system_prompts = items.count_system_prompts()  # of the student
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

    def require_files(self) -> None:
        """Check that rows, prompts and models whose name is a path are there; nothing is loaded.

        Raises:
            InputError: If one is not.
        """
        for source in self.sources:
            self.reader.open(source)
        for source in self.val_sources:
            replace(self.reader, split=self.val_split).open(source)
        for name in filter(None, (self.tokenizer_name, self.reader_name)):
            require_model_name(name)

    def with_rows(self, rows: list[dict[str, Any]]) -> Self:
        """Return data of the same settings but other rows, of which none is held out or too much."""
        data = copy(self)
        data.sources, data.val_sources, data.val_rows = parse_sources(rows), [], 0
        data.max_bad_frac, data._prepared_for = 1.0, None
        return data

    def train_dataloader(self) -> StepLoader[Item, PromptBatch | SFTBatch]:
        """Return batches of one optimizer step, resumable in the middle of an epoch."""
        self.chosen.warn_of_guesses(self.system_prompts)
        return self.step_loader()

    def step_loader(self) -> StepLoader[Item, PromptBatch | SFTBatch]:
        """Return the training loader, for callers that only ask for its length."""
        share = (self.seed, self._rank(), self._world_size())
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
        self.chosen.warn_of_guesses(self.system_prompts)
        left = self.items[ask_callbacks(self.trainer, "num_finished") or 0 :]
        return DealtLoader(left, self.val_batch_size, self.collate, self._rank(), self._world_size())

    def collate(self, items: list[Any]) -> PromptBatch | SFTBatch:
        """Make a batch; completions that the rows bring are attached as rollouts."""
        return PromptBatch(items)

    # For all stages

    def build_card_metadata(self) -> dict[str, Any]:
        """Return the source and the format of the rows, for a data card."""
        return {
            "source": f"{self.source} ({len(self.items)} usable rows)",
            "tags": describe_tags(self.format.tags),
            "student's context": self.student_context or "no limit",
        }

    def trained_format(self) -> ModelFormat:
        """Return the format in which this run trains its model."""
        if self.role == "teacher":
            prompts = Counter([self.format.teacher_system_prompt])
            return ModelFormat.from_rows("teacher", self.format.tags, prompts)
        return ModelFormat.from_rows("student", self.format.student_tags, self.system_prompts)

    def fingerprint_rows(self) -> list[str]:
        """Return a hash of the rows that train, for each source."""
        items, sources = self.items, range(len(self.sources))
        return [items.select(items.sources == source).fingerprint() for source in sources]

    def list_vocabularies(self) -> list[tuple[str, Any, tuple[str, ...]]]:
        """Return the run's models, each with its tokenizer and the columns of items that it reads."""
        trained = require_model(self.tokenizer_name), self.format.tokenizer, TRAINED_COLUMNS
        vocabularies: list[tuple[str, Any, tuple[str, ...]]] = [trained]
        if self.student_reads and self.reader_name is not None:
            vocabularies.append((self.reader_name, self.format.student_tokenizer, READ_COLUMNS))
        return vocabularies

    def count_ids(self) -> int:
        """Return how many token ids every model has that reads what the first of them samples.

        Raises:
            InputError: If a model has no row for a token of its tokenizer.
        """
        ids, counts = self.format.tokenizer.get_vocab().items(), []
        for name, tokenizer, columns in self.list_vocabularies():
            largest = partial(self.all_items.find_largest, *columns)
            count = count_ids(name, tokenizer, largest, self.trust_remote_code)
            if ids <= tokenizer.get_vocab().items():
                counts.append(count)
        return min(counts)

    @property
    def all_items(self) -> StoredItems:
        """Return the items of all rows, the held-out ones last."""
        return self.items + self.val_items

    @property
    def problems(self) -> Sequence[Problem]:
        """Return all problems, the held-out ones last, of a stage that has problems."""
        return cast(Sequence[Problem], self.all_items)

    # Helpers

    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer else 0

    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def _tokenize(
        self, sources: list[Source], reader: SourceReader
    ) -> tuple[StoredItems, list[BadRowReport]]:
        """Read and tokenise sources, or find them in the cache; row numbers continue from one to the next."""

        def make_rows() -> Iterator[dict[str, Any]]:
            before = last = 0
            for number, source in enumerate(sources):
                for made in self.make_items(reader.read(source), BadRowReport(str(source))):
                    last = max(last, before + made["row"])
                    yield {**made, "source": number, "row": before + made["row"]}
                before = last

        table = build_table(make_rows, self.build_key(sources, reader))
        return StoredItems(table), read_reports(table, list(map(str, sources)))

    def build_key(self, sources: Sequence[Source], reader: SourceReader) -> str | None:
        """Return a hash of all that decides the items: their key in the cache.

        None for rows that are not in files, and for a class of one's own, whose code is not in the key.
        """
        rows = [reader.fingerprint(source) for source in sources]
        if None in rows or not type(self).__module__.startswith("rlt_lightning."):
            return None
        settings = {"versions": list_versions(), **self.describe()}
        settings["format"] = describe_format(self.format)
        return hash_value([settings, rows])

    def _check_rows(self) -> None:
        """Report the rows that are not used, and stop if they are too many, or not those of the model."""
        path = Path(self.output_dir) / "data_report.json" if self.output_dir else None
        if path and self._rank() == 0:
            write_reports(path, self.reports)
        for report in self.reports:
            report.check(self.max_bad_frac, path)
            for line in report.lines():
                rank_zero_warn(line + (f"; see {path}" if path else ""))
        self.chosen.check_rows(self.system_prompts)


def get_stratos_data(trainer: Trainer) -> StratosDataModule:
    """Return a run's datamodule; Lightning's type annotations lack this attribute."""
    return cast(StratosDataModule, getattr(trainer, "datamodule", None))


# Checks of the settings, made when the datamodule is built


def require_settings(data: StratosDataModule) -> None:
    """Check the settings of a StratosDataModule.

    Raises:
        InputError: Naming the setting.
    """
    require_sizes(
        prompts_per_step=data.prompts_per_step,
        max_prompt_length=data.max_prompt_length,
        val_batch_size=data.val_batch_size,
        max_rows=data.reader.max_rows,
        num_embedded_rows=data.reader.num_embedded_rows,
    )
    if data.val_rows < 0:
        raise InputError(f"data.val_rows must be at least 0, but is {data.val_rows}. 0 holds none out.")
    if not 0 <= data.max_bad_frac <= 1:
        raise InputError(
            f"data.max_bad_frac must be in [0, 1], but is {data.max_bad_frac}. Set a part of the rows."
        )
    if not data.sources:
        raise InputError("data.source must name at least one source, but is an empty list. Name one.")


def require_sizes(**sizes: int | None) -> None:
    """Check that sizes, where they are set, are at least 1.

    Raises:
        InputError: Naming the setting.
    """
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise InputError(f"data.{name} must be at least 1, but is {size}. Raise it.")


def read_trace_columns(columns: Sequence[str]) -> list[str]:
    """Return the columns of traces: different ones, and no column of completions.

    Raises:
        InputError: If they are not.
    """
    if len(set(columns)) != len(columns) or not columns:
        raise InputError(
            f"data.trace_columns must name one or several different columns, but is {[*columns]}. Change it."
        )
    if "completion" in columns:
        raise InputError(
            "data.trace_columns must name columns of traces, but names completion. Name "
            f"{TRACE_COLUMN} instead: a row's completion is scored in its place."
        )
    return [*columns]


def find_models(module: Any) -> tuple[str | None, str | None]:
    """Return the names of a module's trained or evaluated model, and of the frozen one that reads for it."""
    student = getattr(module, "student", None)
    reader = getattr(module, "teacher_name", None) if student is None else student.name
    return getattr(module, "pretrained", None), reader
