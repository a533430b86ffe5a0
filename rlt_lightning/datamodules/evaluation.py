"""The datamodule of `rlt test`: the problems of evaluation sets.

modules/evaluation.py asks a model these problems and judges its responses.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import LightningDataModule, Trainer

from rlt_lightning.datamodules.evaluation_sets import (
    SETS,
    EvaluationProblem,
    SetSettings,
    build_set,
    read_set,
)
from rlt_lightning.datamodules.format_choice import ChosenFormat, FormatOptions, choose_format, require_model
from rlt_lightning.datamodules.formats import ChatFormat, encode
from rlt_lightning.datamodules.loader import OrderedLoader, find_shard
from rlt_lightning.datamodules.stratos import find_models, require_sizes
from rlt_lightning.judging.answers import JUDGE_VERSION
from rlt_lightning.models.load import load_tokenizer, require_model_name
from rlt_lightning.run.jsonl import JsonRow, read_whole_rows
from rlt_lightning.run.ranks import ask_callbacks
from rlt_lightning.tags import TagStyle
from rlt_lightning.types import Batch, FinishReason, InputError

DEFAULT_SETS = ("aime24", "math500", "gpqa_diamond")  # Table 1 of the paper


@dataclass(frozen=True)
class Response:
    """A model's whole answer to a question, tags included.

    Attributes:
        text: The text.
        num_tokens: Sampled tokens.
        finish_reason: Why sampling ended.
    """

    text: str
    num_tokens: int
    finish_reason: FinishReason


@dataclass
class EvaluationBatch(Batch):
    """Problems of one set. EvaluationModule attaches the judged records.

    Attributes:
        problems: The problems.
        records: One record of each judged response of this rank.
    """

    problems: list[EvaluationProblem]
    records: list[dict[str, Any]] = field(default_factory=list)


class EvaluationDataModule(LightningDataModule):
    """Questions of evaluation sets, as the student's prompts.

    `setup` reads all sets before any model is loaded. A resumed run leaves out problems that it has finished.

    Args:
        sets: Names of `SETS`, each with null, with a file, folder or hub id to read instead of its own hub
            id, or with fields of an EvaluationSet to change. Any other name with a source is your own set.
            None: AIME 2024, MATH-500 and GPQA Diamond.
        tokenizer: Name of the model whose chat template is used; None: that of the run's module.
        tags: "stratos", "r1", or the fields of a TagStyle; None: as the model was trained, else stratos.
        student_system_prompt: None: as the model was trained, else ours; '' for none.
        force_format: Use these settings although the model records that it was trained in others.
        max_rows: Most problems of each set, from its start.
        seed: Seed of the order of GPQA's options, and of the embedded sets.
        batch_size: Problems whose responses are sampled at once, and recorded together.
        num_samples: Responses to each problem; in a run those of its ResponseCallback.
        output_dir: The run folder.
        trust_remote_code: Run code that comes with a tokenizer.
    """

    def __init__(
        self,
        sets: dict[str, SetSettings] | None = None,
        tokenizer: str | None = None,
        tags: str | TagStyle | None = None,
        student_system_prompt: str | None = None,
        force_format: bool = False,
        max_rows: int | None = None,
        seed: int = 0,
        batch_size: int = 32,
        num_samples: int = 1,
        output_dir: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        self.sets: dict[str, SetSettings] = dict.fromkeys(DEFAULT_SETS) if sets is None else sets
        self.specs = {name: build_set(name, settings) for name, settings in self.sets.items()}
        self.follows_module = tokenizer is None
        self.tokenizer_name = tokenizer
        self.format_options = FormatOptions(tags, None, student_system_prompt, force_format)
        self.max_rows = max_rows
        self.seed = seed
        self.batch_size = batch_size
        self.num_samples = num_samples
        self.output_dir = output_dir
        self.trust_remote_code = trust_remote_code
        self.chosen: ChosenFormat | None = None  # None if EvaluateEvery sets the format
        self.format: ChatFormat | None = None
        self.finished: list[JsonRow] = []  # records from before the run was resumed
        self.left: list[EvaluationProblem] = []  # problems without a record
        self._prepared_for: tuple[Any, ...] | None = None  # tokenizer, folder, responses to each problem
        self._check_arguments()

    def _check_arguments(self) -> None:
        if not self.sets:
            raise InputError(
                f"data.sets must name at least one of {', '.join(SETS)}, but is empty. Name one."
            )
        require_sizes(max_rows=self.max_rows, batch_size=self.batch_size, num_samples=self.num_samples)

    def setup(self, stage: str) -> None:
        """Read everything, so that bad data is reported before a model is loaded."""
        if self.follows_module and self.trainer is not None:
            self.tokenizer_name, _ = find_models(self.trainer.lightning_module)
        if describe := ask_callbacks(self.trainer, "describe_responses"):
            self.num_samples = describe()["num_samples"]
        wanted = (self.tokenizer_name, self.output_dir, self.num_samples)
        if self._prepared_for == wanted:
            return
        self.require_files()
        sets = {
            name: read_set(name, settings, self.max_rows, self.seed) for name, settings in self.sets.items()
        }
        self.problems = [problem for problems in sets.values() for problem in problems]
        # EvaluateEvery sets the format of the run that it evaluates, and then none is chosen here.
        if self.format is None or self.chosen is not None:
            self.format = self._load_format()
        self.problems = [self._with_prompt(problem) for problem in self.problems]
        self.finished = self._finished_records()
        done = {record["id"] for record in self.finished}
        self.left = [problem for problem in self.problems if problem.id not in done]
        self._prepared_for = wanted

    def require_files(self) -> None:
        """Check that rows, prompts and the model whose name is a path are there; nothing is loaded.

        Raises:
            InputError: If one is not.
        """
        for spec in self.specs.values():
            spec.require_source()
        if self.tokenizer_name is not None:
            require_model_name(self.tokenizer_name)

    def test_dataloader(self) -> OrderedLoader[list[EvaluationProblem], EvaluationBatch]:
        """Return the sets one after another, in their order; a batch holds problems of one set only.

        Each rank gets its part of every batch, which may be empty.
        """
        if self.chosen is not None:
            self.chosen.warn_of_guesses()
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        batches: list[list[EvaluationProblem]] = []
        for name in self.sets:
            left = [problem for problem in self.left if problem.set_name == name]
            for start in range(0, len(left), self.batch_size):
                batch = range(start, min(start + self.batch_size, len(left)))
                batches.append([left[number] for number in find_shard(batch, rank, world_size)])
        # Without a batch, Lightning calls no hook, and the results of a finished run would not be written.
        return OrderedLoader(batches or [[]], 1, lambda batches: EvaluationBatch(batches[0]))

    @property
    def tags(self) -> TagStyle:
        """Return the tags of the responses."""
        return self.chat_format.student_tags

    # Helpers

    @property
    def chat_format(self) -> ChatFormat:
        """Return the format in which questions are asked, after `setup`."""
        assert self.format is not None
        return self.format

    def _load_format(self) -> ChatFormat:
        name = require_model(self.tokenizer_name)
        tokenizer = load_tokenizer(name, self.trust_remote_code)
        self.chosen = choose_format(self.format_options, None, name)
        return self.chosen.build_format(tokenizer)

    def _with_prompt(self, problem: EvaluationProblem) -> EvaluationProblem:
        chat = self.chat_format.render_student_chat(problem.question)
        return replace(problem, prompt=encode(self.chat_format.tokenizer, chat))

    def _finished_records(self) -> list[JsonRow]:
        """Return the records of problems for which an interrupted run has all responses.

        Raises:
            InputError: If another judge wrote one, whose verdicts cannot be averaged with this one's, or it
                belongs to another problem.
        """
        if self.output_dir is None:
            return []
        problems = {problem.id: problem for problem in self.problems}
        records: dict[str, list[JsonRow]] = {name: [] for name in problems}
        path = Path(self.output_dir) / "responses.jsonl"
        for _, record in read_whole_rows(path):
            if (judge := record.get("judge")) != JUDGE_VERSION:
                raise InputError(
                    f"A resumed run must have the judge that it began with, but {path} is by {judge}, and "
                    f"this is {JUDGE_VERSION}. Restore that version, or choose another --output_dir."
                )
            if (problem := problems.get(record["id"])) is None:
                continue
            if record.get("problem") != problem.fingerprint:
                raise InputError(
                    f"A resumed run must have the problems that it began with, but {path} has a response to "
                    f"another {problem.id}. Restore the set in data.sets, or choose another --output_dir."
                )
            records[problem.id].append(record)
        return [record for part in records.values() if len(part) == self.num_samples for record in part]


def get_evaluation_data(trainer: Trainer) -> EvaluationDataModule:
    """Return a run's datamodule; Lightning's type annotations lack this attribute."""
    return cast(EvaluationDataModule, trainer.datamodule)  # type: ignore[attr-defined]
