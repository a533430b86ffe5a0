"""Train one model as teacher and student in each step: it explains a solution, and learns to do without it.

    as teacher   question, solution ─▶ explanation, sampled: policy gradient, its reward is that of RLT
    as student   question           ─▶ the same explanation, read: distilled towards the teacher

Run: PYTHONPATH=examples rlt fit --config laptop/rlt --model joint_stage.JointModule
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.losses import LossInputs, LossOutput, LossTerm
from rlt_lightning.numerics.divergence import Divergence
from rlt_lightning.rewards.explanations import build_explanation_pass
from rlt_lightning.rewards.students import Student
from rlt_lightning.rollouts.step import POLICY, ScoringPass
from rlt_lightning.types import Rollout


class SelfDistillation(LossTerm):
    """The divergence of the policy, which sees the question, from itself, who sees the solution too."""

    def __init__(self, student: Student, weight: float, divergence: Divergence) -> None:
        self.student = student
        self.weight = weight
        self.divergence = divergence

    def scoring_pass(self, rollout: Rollout) -> ScoringPass:
        """Return the explanation without the solution, compared with the explanation as it was sampled."""
        view, prompt = rollout.views[self.student.number], rollout.problem.teacher_prompt
        whole, think, _ = build_explanation_pass(self.student, view)
        tokens = rollout.completion.token_ids[: view.num_tokens]
        scored = len(prompt), len(prompt) + len(tokens)
        teacher = ScoringPass(POLICY, prompt, tokens, scored, rollout.problem.row)
        return replace(whole, scored=think, compared_with=teacher, divergence=self.divergence)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the mean divergence of a token, times the weight."""
        mean = inputs.computed.values.sum() / max(1.0, inputs.micro.num_scored)
        return LossOutput(self.weight * mean, {"policy/self_divergence": mean.detach()})


class JointModule(RLTModule):
    """RLT in which the policy is its own student, and learns as one.

    Args:
        teacher: The model.
        distillation_weight: Weight of the distillation.
        divergence: What is minimised.
        options: Those of `RLTModule`, but `student` and `students`.
    """

    def __init__(
        self,
        teacher: str = DEFAULT_MODEL,
        distillation_weight: float = 1.0,
        divergence: Divergence = Divergence("forward"),
        **options: Any,
    ) -> None:
        super().__init__(teacher, teacher, **options)
        self.students = replace(self.students, model=POLICY)
        self.distillation_weight = distillation_weight
        self.divergence = divergence

    @property
    def frozen_names(self) -> tuple[str, ...]:
        """Return no name: nobody but the policy reads."""
        return ()

    @property
    def losses(self) -> list[LossTerm]:
        """Add the distillation."""
        [student] = self.students
        term = SelfDistillation(student, self.distillation_weight, self.divergence)
        return [*super().losses, term]
