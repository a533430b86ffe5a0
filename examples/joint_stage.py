"""JOLT (arXiv:2610.10447): one model samples each question as teacher, with a hint, and as student, without.

    teacher   question, hint ─▶ answer    A_t = A(answer) + teacher_ratio * (log p_student - log p_teacher)
    student   question       ─▶ answer    A_t = student_reward * A(answer) + student_ratio * (the opposite)

Two credits of tokens, Eqs. 18 to 21: the teacher is rewarded for right answers that the student could have
given, and the student learns what only the teacher finds likely. Both log-probs are the model's own, in the
two views. In the miniature GRPO did better on all tasks tried: a hint with the answer is copied, and teaches
nothing.

Run: PYTHONPATH=examples rlt fit --config laptop/grpo --model joint_stage.JOLTModule \\
    --data joint_stage.TwoViewData
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlt_lightning.datamodules import StudentOPDData
from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.credits import Credit, RatioCredit, RewardCredit
from rlt_lightning.modules.losses import LossInputs
from rlt_lightning.numerics import DAPOLoss, GroupCenteredAdvantages
from rlt_lightning.numerics.transfers import upload
from rlt_lightning.rewards import CorrectnessReward
from rlt_lightning.rollouts.step import ScoringPass
from rlt_lightning.types import Problem, PromptBatch, Rollout


class TwoViewData(StudentOPDData):
    """Brings each question twice: to the student, and as row -N, with the views exchanged, to the teacher."""

    def __init__(self, source: Any = "chains", **options: Any) -> None:
        super().__init__(source, **{"view": "hint"} | options)

    def collate(self, items: list[Problem]) -> PromptBatch:  # type: ignore[override]
        """Return the problems of both roles."""
        return PromptBatch([problem for student in items for problem in (student, as_teacher(student))])


def as_teacher(student: Problem) -> Problem:
    """Return a student's problem in the teacher's role."""
    view, prompt = student.teacher_view, student.teacher_prompt
    return replace(student, row=-student.row, teacher_prefix=view, think_prefix=[], teacher_view=prompt)


@dataclass(frozen=True)
class RoleCredit(Credit):
    """One credit for what the teacher has sampled, and one for what the student has."""

    teacher: Credit
    student: Credit

    def scoring_passes(self, rollout: Rollout) -> list[ScoringPass]:
        """Return those of both, which are the same: the other view."""
        return self.teacher.scoring_passes(rollout) + self.student.scoring_passes(rollout)

    def __call__(self, inputs: LossInputs) -> Tensor:
        """Return the credit of each token by its row's role, (n, T)."""
        is_teacher = upload([row.problem.row < 0 for row in inputs.rollouts], inputs.log_probs.device)
        return torch.where(is_teacher.unsqueeze(1), self.teacher(inputs), self.student(inputs))


class JOLTModule(RLTModule):
    """Train one policy in both roles; `student_reward` 1 is JOLT+."""

    data_classes = (TwoViewData,)

    def __init__(
        self,
        teacher: str = DEFAULT_MODEL,
        teacher_ratio: float = 0.001,
        student_ratio: float = 0.1,
        student_reward: float = 0.0,
        **options: Any,
    ) -> None:
        options.setdefault("reward", CorrectnessReward(right=1.0, wrong=0.0, unformatted=0.0))
        options.setdefault("advantages", GroupCenteredAdvantages())
        options.setdefault("policy_loss", DAPOLoss(kl_coef=0.0))
        super().__init__(teacher, None, **options)
        self.credit = RoleCredit(
            teacher=RewardCredit() + RatioCredit(weight=teacher_ratio),
            student=student_reward * RewardCredit() + RatioCredit(weight=student_ratio),
        )
