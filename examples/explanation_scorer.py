"""Score the completions of another trainer: trl_reward.py and verl_reward.py are built on this.

    row ────────▶ Problem ┐
    completion ───────────┴▶ Rollout ─▶ PassRunner, Reward ─▶ StepBatch: reward and its terms

The other program samples, and provides the teacher.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from rlt_lightning.datamodules.stages import ReadData, TeacherRLData
from rlt_lightning.models.kernels import Kernels, prepare_model
from rlt_lightning.models.load import Dtype, load_model
from rlt_lightning.models.packed import HeadOptions, verify_layout
from rlt_lightning.modules.frozen import Model, RunModel
from rlt_lightning.modules.passes import PassRunner, score_rollouts
from rlt_lightning.numerics.packing import Layout
from rlt_lightning.rewards import Reward, RLTReward
from rlt_lightning.rewards.explanations import require_scorable
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.step import POLICY, StepBatch
from rlt_lightning.strategies.sharding import ModelEntry
from rlt_lightning.tags import TagStyle, decode
from rlt_lightning.types import BadRowError, Completion, InputError, Problem, Rollout, Rollouts


class ExplanationScorer:
    """Score explanations with a frozen student.

    Args:
        student: Frozen model that scores: local folder, hub id, or a name such as miniature.
        teacher: The model that is trained, as it is when training starts: its tokenizer and its format.
        reward: The RLT reward and its options, or another one that judges explanations.
        tags: "stratos", "r1" or a TagStyle; None: as the models were trained, else stratos.
        teacher_system_prompt: None: as the teacher was trained, else ours; '' for none.
        student_system_prompt: None: as the student was trained, else the row's, else ours; '' for none.
        force_format: Use these settings although a model records that it was trained in others.
        student_dtype: Type of the student's weights.
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
        student: str,
        teacher: str,
        reward: Reward = RLTReward(),
        tags: str | TagStyle | None = None,
        teacher_system_prompt: str | None = None,
        student_system_prompt: str | None = None,
        force_format: bool = False,
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
        self.data = self.data_type(
            tokenizer=teacher,
            student_tokenizer=student,
            tags=tags,
            teacher_system_prompt=teacher_system_prompt,
            student_system_prompt=student_system_prompt,
            force_format=force_format,
            trust_remote_code=trust_remote_code,
            # No limits: the caller has chosen its rows.
            max_prompt_length=sys.maxsize,
            max_length=sys.maxsize,
        )
        self.data.load_format()
        self.format, self.tokenizer = self.data.format, self.data.format.tokenizer
        self.student = Student.of(student, chat_format=self.format)
        require_scorable(reward, self.student)
        self.data.chosen.warn_of_guesses()
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
        """Attach a completion to its problem, as the student reads it."""
        return self.data.build_rollout(problem, completion)

    def score(
        self, rollouts: Sequence[Rollout], teacher: RunModel, device: torch.device, group_size: int = 1
    ) -> StepBatch:
        """Return N explanations with their rewards and terms, each (N,).

        Args:
            rollouts: N explanations, made by `build_rollout`; those of one problem share its prompt's
                computation.
            teacher: Calls the teacher: teacher(function, *arguments) is function(model, *arguments).
            device: The teacher's device; the student moves there.
            group_size: Completions of a group, in adjacent rows; only a reward that compares them needs it.

        Raises:
            NonFiniteError: If a log-prob or reward is NaN or infinite.
        """
        assert group_size > 1 or not self.reward.compares, "completions can be compared in groups only"
        self._prepare_models(teacher, device)
        models = self.models | {POLICY: Model(teacher)}
        runner = PassRunner(models, device, self.head, self.micro_batch_tokens, self.layout)
        groups = Rollouts(list(rollouts), group_size, 0, self.temperature)
        return score_rollouts(runner, self.reward, self.student, groups)

    @property
    def temperature(self) -> float:
        """Return the temperature at which completions were sampled."""
        of_kl = self.reward.find_kl(temperature=1.0)
        return 1.0 if of_kl is None else of_kl.teacher_temperature

    @property
    def frozen_names(self) -> tuple[str, ...]:
        """Return the name of the student, if it has weights of its own."""
        return self.student.frozen_names

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
            self.layout = verify_layout(teacher, self.teacher_name, self.layout)
            self.checked = True
        for student in self.models.values():
            student.model.to(device)
