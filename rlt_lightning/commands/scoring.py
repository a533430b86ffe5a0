"""Score a few problems: for `rlt explain`, `rlt check`, `Teacher`, and the reward functions for TRL and verl.

score_problems      rows ─▶ Problems ─▶ their completions, or those that an engine samples ─▶ RLTModule
                    the models are loaded here, as in `rlt predict`: `rlt explain`, `rlt check`, Teacher
ExplanationScorer   row ────────▶ Problem ┐
                    completion ───────────┴▶ Rollout ─▶ Reader, Reward ─▶ Score: reward and its terms
                    another program (TRL, verl) samples, and provides the teacher
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rlt_lightning.callbacks.progress import IterationLines, has_terminal
from rlt_lightning.callbacks.rollout import RolloutCallback
from rlt_lightning.callbacks.rollout_checks import list_model_contexts
from rlt_lightning.console import waiting_for
from rlt_lightning.datamodules.stages import ReadData, TeacherRLData
from rlt_lightning.datamodules.stratos import StratosDataModule, get_stratos_data
from rlt_lightning.datamodules.student_views import StudentViews
from rlt_lightning.models.kernels import Kernels, prepare_model
from rlt_lightning.models.load import Dtype, load_model
from rlt_lightning.models.packed import HeadOptions, verify_layout
from rlt_lightning.modules.frozen import Model, RunModel
from rlt_lightning.modules.reader import Reader, score_rollouts
from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.numerics.packing import Layout, MicroBatch, SequenceLengths, micro_batches
from rlt_lightning.numerics.students import Reduction
from rlt_lightning.rewards import Reward, RLTReward, TextReward
from rlt_lightning.rewards.explanations import build_empty_completion, require_scorable
from rlt_lightning.rewards.students import StudentNames, Students, split_student_setting
from rlt_lightning.rollouts.step import POLICY, Score, StepBatch
from rlt_lightning.strategies.sharding import ModelEntry
from rlt_lightning.tags import TagStyle, decode
from rlt_lightning.types import (
    BadRowError,
    Completion,
    InputError,
    Problem,
    PromptBatch,
    RewardTerms,
    Rollout,
    Rollouts,
)


class NoReward(TextReward):
    """The reward that `Teacher` uses if it has no student; its zeros are not shown."""

    def __call__(self, rollouts: list[Rollout], tags: TagStyle) -> RewardTerms:
        """See `TextReward`."""
        return RewardTerms(torch.zeros(len(rollouts)))


@dataclass(frozen=True)
class ScoredBatch:
    """Completions of some rows with their rewards.

    Attributes:
        step: The completions.
        empty: An empty explanation of the first problem, scored; None if none was asked for.
    """

    step: StepBatch
    empty: StepBatch | None

    @property
    def rollouts(self) -> list[Rollout]:
        """Return the completions."""
        return self.step.rollouts(self.step.shard)


def score_problems(
    module: RLTModule,
    data: StratosDataModule,
    rollouts: RolloutCallback,
    with_empty: bool = False,
    progress: bool = False,
    **trainer: Any,
) -> list[ScoredBatch]:
    """Score completions of rows as `rlt predict` does, in one process, and leave no files.

    Args:
        module: The teacher, its students and the reward.
        data: The rows; those of ScoringData bring their completions. Of a TeacherRLData with one row
            completions end where the models' contexts do.
        rollouts: How completions are sampled, if the rows bring none.
        with_empty: Whether the students score an empty explanation too.
        progress: Whether a bar, or lines in a log, count the batches of data.val_batch_size rows.
        trainer: Further arguments of Lightning's Trainer, such as accelerator and precision.

    Raises:
        InputError: If a row cannot be used, or the models' contexts leave no room for an explanation.
    """
    collector = ScoreCollector(with_empty, progress)
    lines = [IterationLines()] if progress and not has_terminal() else []
    with TemporaryDirectory(prefix="rlt-") as folder:
        settings = trainer | {
            # The collector first: RolloutCallback checks in its setup whether completions fit.
            "callbacks": [collector, rollouts, *lines],
            "default_root_dir": folder,
            "devices": 1,
            "num_nodes": 1,
            "strategy": "auto",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": progress and not lines,
        }
        Trainer(**settings).predict(module, datamodule=data, return_predictions=False)
    return collector.scored


class ScoreCollector(Callback):
    """Keep the scored batches of a prediction, and fit completions into the models' contexts."""

    def __init__(self, with_empty: bool, progress: bool) -> None:
        self.with_empty, self.progress = with_empty, progress
        self.scored: list[ScoredBatch] = []
        self.waiting = ExitStack()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        data = get_stratos_data(trainer)
        if isinstance(data, TeacherRLData) and len(data.items) == 1:
            fit_context(trainer, cast(RLTModule, pl_module))

    @override
    def on_predict_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if isinstance(get_stratos_data(trainer), TeacherRLData):
            number = len(batch.problems)
            what = "the explanation" if number == 1 else f"explanations of {number} problems"
            self.waiting.enter_context(waiting_for(what))

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.waiting.close()

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        empty = None
        if self.with_empty:
            assert batch.rollouts is not None
            # In the precision in which RLTModule scored the explanations.
            with trainer.precision_plugin.forward_context():
                rollout = build_empty_rollout(batch.problems[0], get_stratos_data(trainer).student_views)
                rollouts = replace(batch.rollouts, rollouts=[rollout], group_size=1)
                empty = cast(RLTModule, pl_module).score(rollouts)
        self.waiting.close()
        self.scored.append(ScoredBatch(batch.step, empty))


def build_empty_rollout(problem: Problem, views: StudentViews) -> Rollout:
    """Return an empty explanation as every student reads it, with which others are compared."""
    return views.build_rollout(problem, build_empty_completion(problem, views.formats[0]))


def fit_context(trainer: Trainer, module: RLTModule) -> None:
    """Limit completions to the room that the only problem leaves in the models' contexts.

    Args:
        trainer: The trainer, whose RolloutCallback is changed.
        module: The RLTModule.

    Raises:
        InputError: If there is no room for an explanation.
    """
    models = list_model_contexts(module, get_stratos_data(trainer))
    room = min(model.context - int(model.fixed[0]) for model in models)
    if room < 1:
        raise InputError(
            "Question and solution must leave room for an explanation, but with their prompts they are "
            f"{1 - room} tokens too long for the models' contexts. Shorten them."
        )
    rollouts = RolloutCallback.of(trainer)
    if room < rollouts.sampling.max_completion_length:
        rollouts.sampling = replace(rollouts.sampling, max_completion_length=room)
    rollouts.val_sampling = rollouts.sampling


class ExplanationScorer:
    """Score explanations with a frozen student, or with several.

    Args:
        student: Frozen model that scores: local folder, hub id, or a name such as miniature; or several, as a
            list or as weights by name.
        teacher: The model that is trained, as it is when training starts: its tokenizer and its format.
        reward: The RLT reward and its options, or another one that judges explanations.
        tags: "stratos", "r1" or a TagStyle; None: as the models were trained, else stratos.
        teacher_system_prompt: None: as the teacher was trained, else ours; '' for none, @FILE for the text of
            a file.
        student_system_prompt: None: as the student was trained, else the row's, else ours; '' and @FILE too.
        force_format: Use these settings although a model records that it was trained in others.
        student_reduction: How the rewards of several students become one: "mean", or the smallest, "min".
        student_dtype: Type of the students' weights.
        micro_batch_tokens: Tokens per forward; a longer sequence gets a forward by itself.
        layout: How sequences share a forward; see `PolicyModule`.
        trust_remote_code: Run code that comes with a model.

    Raises:
        InputError: If the reward judges something else, a model or its tokenizer cannot be loaded, or a
            setting contradicts what a model was trained in or what a student with another tokenizer allows.
    """

    data_type: ClassVar[type[ReadData]] = TeacherRLData

    def __init__(
        self,
        student: str | StudentNames,
        teacher: str,
        reward: Reward = RLTReward(),
        tags: str | TagStyle | None = None,
        teacher_system_prompt: str | None = None,
        student_system_prompt: str | None = None,
        force_format: bool = False,
        student_reduction: Reduction = "mean",
        student_dtype: Dtype = "float32",
        micro_batch_tokens: int = 16384,
        layout: Layout = "auto",
        trust_remote_code: bool = False,
    ) -> None:
        if self.data_type.samples not in reward.judges:
            raise InputError(
                f"{type(self).__name__} needs a reward that judges {self.data_type.samples}, but "
                f"{type(reward).__name__} judges {' or '.join(reward.judges)}. Pass another one; rlt fit "
                "trains with this one too."
            )
        students = Students.of(*split_student_setting(student), student_reduction)
        names = students.names
        self.data = self.data_type(
            tokenizer=teacher,
            student_tokenizer=[*names],
            tags=tags,
            teacher_system_prompt=teacher_system_prompt,
            student_system_prompt=student_system_prompt,
            force_format=force_format,
            trust_remote_code=trust_remote_code,
            # No limits: the caller has chosen its rows.
            max_prompt_length=sys.maxsize,
            max_length=sys.maxsize,
        )
        self.data.format_options = replace(self.data.format_options, group="")  # for messages
        self.data.load_formats()
        self.student_views, self.format = self.data.student_views, self.data.format
        self.tokenizer = self.format.tokenizer
        self.students = students.with_formats(self.student_views.formats)
        require_scorable(reward, self.students)
        self.student_views.warn_of_guesses()
        self.teacher_name = teacher
        self.reward = reward
        self.student_dtype: Dtype = student_dtype
        self.micro_batch_tokens = micro_batch_tokens
        # Once the models are there, the best layout in which both are right.
        self.layout: Layout = layout
        self.head = HeadOptions()
        self.trust_remote_code = trust_remote_code
        self.models: dict[str, Model] = {}
        self.checked = False

    def build_problem(self, number: int, row: dict[str, Any]) -> Problem:
        """Tokenise a row: question and solution, or a Bespoke-Stratos row.

        Args:
            number: Number of the row, from 1.
            row: Its columns.

        Raises:
            InputError: If the row cannot be used; it names the number and the reason.
        """
        try:
            return self.data.build_problem(number, self.data.parse(row), row)
        except BadRowError as error:
            raise InputError(
                f"Row {number} must have a question and a solution, but cannot be used: {error.detail}. "
                "Correct it, or leave it out."
            ) from error

    def build_problems(self, rows: Iterable[dict[str, Any]]) -> list[Problem]:
        """Tokenise rows, numbered from 1; equal rows share one problem, and its number.

        Raises:
            InputError: If a row cannot be used; it names the number and the reason.
        """
        found: dict[str, Problem] = {}
        keys = []
        for row in rows:
            keys.append(key := repr(row))
            if key not in found:
                found[key] = self.build_problem(len(found) + 1, row)
        return [found[key] for key in keys]

    def build_prompt(self, problem: Problem) -> str:
        """Return the text that the teacher continues; it ends after the opening explanation tag."""
        return decode(self.tokenizer, problem.teacher_prompt)

    def build_rollout(self, problem: Problem, completion: Completion) -> Rollout:
        """Attach a completion to its problem, as every student reads it."""
        return self.student_views.build_rollout(problem, completion)

    def score(
        self, rollouts: Sequence[Rollout], teacher: RunModel, device: torch.device, group_size: int = 1
    ) -> Score:
        """Return the reward of N explanations and its terms, each (N,).

        Args:
            rollouts: N explanations, made by `build_rollout`; those of one problem share its prompt's
                computation.
            teacher: Calls the teacher: teacher(function, *arguments) is function(model, *arguments).
            device: The teacher's device; the students move there.
            group_size: Completions of a group, in adjacent rows; only a reward that compares them needs it.

        Raises:
            NonFiniteError: If a log-prob or reward is NaN or infinite.
        """
        assert group_size > 1 or not self.reward.compares, "completions can be compared in groups only"
        self._prepare_models(teacher, device)
        models = self.models | {POLICY: Model(teacher)}
        reader = Reader(models, self._plan, device, self.head)
        groups = Rollouts(list(rollouts), group_size, 0, self.temperature)
        step = score_rollouts(reader, self.reward, self.students, groups)
        assert step.score is not None
        return step.score

    @property
    def temperature(self) -> float:
        """Return the temperature at which completions were sampled."""
        of_kl = self.reward.find_kl(temperature=1.0)
        return 1.0 if of_kl is None else of_kl.teacher_temperature

    @property
    def frozen_names(self) -> tuple[str, ...]:
        """Return the names of the students that have weights of their own."""
        return self.students.frozen_names

    def _plan(self, lengths: list[SequenceLengths], all_ranks: bool) -> list[tuple[MicroBatch, float]]:
        return [(row, 1.0) for row in micro_batches(lengths, self.micro_batch_tokens, self.layout)]

    def _prepare_models(self, teacher: RunModel, device: torch.device) -> None:
        """Move the models that score to a device; the first time, load them, and check all models."""
        if not self.checked:
            options = None, self.trust_remote_code, "the frozen student"
            for name in self.frozen_names:
                student = Model.frozen(ModelEntry(load_model(name, self.student_dtype, *options)).to(device))
                self.head = prepare_model(student.run, name, Kernels(), self.head, device)
                self.layout = verify_layout(student.run, name, self.layout)
                self.models[name] = student
            # A teacher whose attention is not ours has it by its architecture: nothing to warn of.
            self.layout = verify_layout(teacher, self.teacher_name, self.layout, attention_chosen=True)
            self.checked = True
        for student in self.models.values():
            student.model.to(device)
