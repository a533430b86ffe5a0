"""The RLT reward of explanations that another program has sampled, computed as `rlt predict` does.

row ────────▶ Problem ┐
completion ───────────┴▶ Rollout ─▶ Scorer (modules/scorer.py) ─▶ reward and its terms
                                        ├ students: loaded here, frozen
                                        └ teacher: a model of the caller, by which it has sampled
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from rlt_lightning.datamodules.format_choice import FormatOptions, choose_formats
from rlt_lightning.datamodules.readers import Readers
from rlt_lightning.datamodules.tokenise import RLTTask
from rlt_lightning.models.kernels import Kernels, prepare_model
from rlt_lightning.models.layouts import verified_layout
from rlt_lightning.models.packed import HeadOptions
from rlt_lightning.modules.frozen import FrozenModel, Run
from rlt_lightning.modules.scorer import Named, Scorer, Students, one_or_several, require_scorable
from rlt_lightning.numerics.packing import Extent, Layout, MicroBatch, micro_batches
from rlt_lightning.numerics.rewards import RLTReward
from rlt_lightning.numerics.students import Reduction
from rlt_lightning.pretrained import Dtype, load_model
from rlt_lightning.strategies.sharding import Entry
from rlt_lightning.tags import TagStyle, decode
from rlt_lightning.types import BadRowError, Completion, InputError, Problem, RewardTerms, Rollout


class ExplanationScorer:
    """Score explanations with a frozen student, or with several.

    Args:
        student: Frozen model that scores: local folder, hub id, miniature or smollm2-135m; or several, as a
            list or as weights by name.
        teacher: The model that is trained, as it is when training starts: its tokenizer and its format.
        reward: The RLT reward and its options, or a subclass with further terms.
        tags: "stratos", "r1" or a TagStyle; None: as the models were trained, else stratos.
        teacher_system_prompt: None: as the teacher was trained, else ours; '' for none, @FILE for the text of
            a file.
        student_system_prompt: None: as the student was trained, else the row's, else ours; '' and @FILE too.
        force_format: Use these settings although a model records that it was trained in others.
        student_reduction: How the rewards of several students become one: "mean", or the smallest, "min".
        student_dtype: Type of the students' weights.
        micro_batch_tokens: Tokens per forward; a longer sequence gets a forward by itself.
        layout: How sequences share a forward; see `RLTModule`.
        trust_remote_code: Run code that comes with a model.

    Raises:
        InputError: If a model or its tokenizer cannot be loaded, or if a setting contradicts what a model was
            trained in or what a student with another tokenizer allows.
    """

    def __init__(
        self,
        student: str | Named,
        teacher: str,
        reward: RLTReward = RLTReward(),
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
        prompts = teacher_system_prompt, student_system_prompt
        options = FormatOptions(tags, *prompts, force_format=force_format, group="")
        self.students = Students.of(*one_or_several(student), student_reduction)
        names = self.students.names
        chosen = choose_formats(options, teacher, names)
        self.readers = Readers(chosen, teacher, names, trust_remote_code)
        self.format, self.tokenizer = self.readers.formats[0], self.readers.formats[0].tokenizer
        require_scorable(reward, self.readers.formats, names)
        self.readers.warn_of_guesses()
        self.task = RLTTask(self.readers)  # without limits: the caller has chosen its rows
        self.teacher_name = teacher
        self.reward = reward
        self.student_dtype: Dtype = student_dtype
        self.micro_batch_tokens = micro_batch_tokens
        # Once the models are there, the best layout in which both are right.
        self.layout: Layout = layout
        self.head = HeadOptions()
        self.trust_remote_code = trust_remote_code
        self.student_models: list[FrozenModel] = []

    def problem(self, number: int, row: dict[str, Any]) -> Problem:
        """Tokenise a row: question and solution, or a Bespoke-Stratos row.

        Args:
            number: Number of the row, from 1.
            row: Its columns.

        Raises:
            InputError: If the row cannot be used; it names the number and the reason.
        """
        try:
            return self.task.build_problem(number, self.task.parse(row), row)
        except BadRowError as error:
            raise InputError(
                f"Row {number} must have a question and a solution, but cannot be used: {error.detail}. "
                "Correct it, or leave it out."
            ) from error

    def problems(self, rows: Iterable[dict[str, Any]]) -> list[Problem]:
        """Tokenise rows, numbered from 1; equal rows share one problem, and its number.

        Raises:
            InputError: If a row cannot be used; it names the number and the reason.
        """
        found: dict[str, Problem] = {}
        keys = []
        for row in rows:
            keys.append(key := repr(row))
            if key not in found:
                found[key] = self.problem(len(found) + 1, row)
        return [found[key] for key in keys]

    def prompt(self, problem: Problem) -> str:
        """Return the text that the teacher continues; it ends after the opening explanation tag."""
        return decode(self.tokenizer, problem.teacher_prompt)

    def rollout(self, problem: Problem, completion: Completion) -> Rollout:
        """Attach a completion to its problem, as every student reads it."""
        return self.readers.with_views(self.format.rollout(problem, completion))

    def terms(self, rollouts: Sequence[Rollout], teacher: Run, device: torch.device) -> RewardTerms:
        """Return the reward of N explanations and its terms, each (N,).

        Args:
            rollouts: N explanations, made by `rollout`; those of one problem share its prompt's computation.
            teacher: Calls the teacher: teacher(function, *arguments) is function(model, *arguments).
            device: The teacher's device; the students move there.

        Raises:
            NonFiniteError: If a log-prob or reward is NaN or infinite.
        """
        models = self._ready_students(teacher, device)
        options = teacher, self._plan, device, self.head, self.readers
        scorer = Scorer(self.reward, self.students, models, *options)
        return scorer(list(rollouts), self.reward.teacher_temperature).terms

    def _plan(self, extents: list[Extent]) -> list[tuple[MicroBatch, float]]:
        return [(row, 1.0) for row in micro_batches(extents, self.micro_batch_tokens, self.layout)]

    def _ready_students(self, teacher: Run, device: torch.device) -> list[FrozenModel]:
        """Return the students on a device; the first time, load them, and check all models."""
        if not self.student_models:
            options = None, self.trust_remote_code, "the frozen student"
            for name in self.students.names:
                student = FrozenModel(Entry(load_model(name, self.student_dtype, *options)).to(device))
                self.head = prepare_model(student.run, name, Kernels(), self.head, device)
                self.layout = verified_layout(student.run, name, self.layout)
                self.student_models.append(student)
            # A teacher whose attention is not ours has it by its architecture: nothing to warn of.
            self.layout = verified_layout(teacher, self.teacher_name, self.layout, attention_chosen=True)
        for student in self.student_models:
            student.model.to(device)
        return self.student_models
