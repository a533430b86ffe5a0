"""JOLT (arXiv:2610.10447): one model samples each question as teacher, with a hint, and as student, without.

    teacher   question, hint ─▶ answer    A_t = A(answer) + 0.001 * (log p_student - log p_teacher)
    student   question       ─▶ answer    A_t = 0.1 * (log p_teacher - log p_student); JOLT+: + A(answer)

By Eqs. 18 to 21 the teacher is rewarded for right answers that the student could have given, and the student
learns what only the teacher finds likely. Both log-probs are the model's own, in the two views. In the
miniature GRPO did better on all tasks tried: a hint with the answer is copied, and teaches nothing.

Run: PYTHONPATH=examples rlt fit --config laptop/grpo --model joint_stage.JOLTModule \\
    --model.advantages GroupCenteredAdvantages --model.policy_loss DAPOLoss --model.policy_loss.kl_coef 0 \\
    --data joint_stage.TwoViewData --data.view hint
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlt_lightning.datamodules import StudentOPDData
from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.credits import Credit, RatioCredit, RewardCredit
from rlt_lightning.modules.passes import LossInputs
from rlt_lightning.rollouts.step import ScoringPass
from rlt_lightning.types import Problem, PromptBatch, Rollout


class TwoViewData(StudentOPDData):
    """Brings each question twice: to the student, and as row -N, with the views exchanged, to the teacher."""

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
        """Return the pass of the other view."""
        return (self.teacher if rollout.problem.row < 0 else self.student).scoring_passes(rollout)

    def __call__(self, inputs: LossInputs) -> Tensor:
        """Return the credit of each token by its row's role, (n, T)."""
        is_teacher = torch.tensor([row.problem.row < 0 for row in inputs.rollouts])[:, None]
        return torch.where(is_teacher.to(inputs.log_probs.device), self.teacher(inputs), self.student(inputs))


class JOLTModule(RLTModule):
    """Train one policy in both roles."""

    data_classes = (TwoViewData,)
    credit = RoleCredit(RewardCredit() + 0.001 * RatioCredit(), 0.1 * RatioCredit())
