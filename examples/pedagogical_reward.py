"""A pedagogical reward: for an explanation with the right answer and no token that surprises the student.

    r = correct - weight * mean_t max(0, -log p_student(y_t) - threshold)

Run: PYTHONPATH=examples rlt fit --config laptop/rlt --model.reward pedagogical_reward.PedagogicalReward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlt_lightning.judging.judge import Judge
from rlt_lightning.numerics.transfers import upload
from rlt_lightning.rewards import Reward
from rlt_lightning.rewards.explanations import build_explanation_pass, list_views
from rlt_lightning.rewards.students import Students
from rlt_lightning.rollouts.step import ScoringPass, StepBatch
from rlt_lightning.types import Rollout


class PedagogicalReward(Reward):
    """Reward right answers, and punish what surprises the student."""

    judges = ("explanations",)

    def __init__(self, weight: float = 0.1, threshold: float = 3.0) -> None:
        self.weight = weight
        self.threshold = threshold  # nats
        self.judge: Judge | None = None

    def scoring_passes(self, rollout: Rollout, students: Students) -> dict[str, ScoringPass]:
        """Return the explanation, as each student reads it."""
        passes = {}
        for student, view in list_views(rollout, students):
            whole, think, _ = build_explanation_pass(student, view)
            passes[student.name("think")] = replace(whole, scored=think, temperature=1.0)
        return passes

    def measure(self, step: StepBatch, rows: Sequence[int], students: Students) -> dict[str, Tensor]:
        """Return the sum of both terms: a right answer, and the mean surprise over the threshold."""
        self.judge = self.judge or Judge(students.formats[0].tags)
        verdicts = self.judge.judge_all((r.text, r.problem.reference) for r in step.rollouts(rows))
        spikes = []
        for student in students:
            log_probs, mask = step.pad(student.name("think"), rows)  # (n, K)
            over = (-log_probs - self.threshold).clamp(min=0) * mask
            spikes.append(over.sum(dim=1) / mask.sum(dim=1).clamp(min=1))
        correct = upload([float(verdict.correct) for verdict in verdicts], spikes[0].device)
        surprise = -self.weight * torch.stack(spikes).mean(dim=0)
        return {"reward": correct + surprise, "term/correct": correct, "term/spikes": surprise}

    def close(self) -> None:
        """End the judge's processes."""
        if self.judge is not None:
            self.judge.close()
