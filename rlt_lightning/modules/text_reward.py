"""Rewards that look at a completion's text alone; the correctness reward of traditional RL is one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlt_lightning.judge import Judge
from rlt_lightning.numerics.rewards import Reward, RewardTerms
from rlt_lightning.types import Problem, Rollout

if TYPE_CHECKING:
    from rlt_lightning.datamodules.formats import TagStyle


class TextReward(Reward, ABC):
    """A reward without models: subclass it for one of your own, and name it as `model.reward`."""

    @abstractmethod
    def __call__(self, rollouts: list[Rollout], tags: TagStyle) -> RewardTerms:
        """Return the reward of N rollouts, from their texts and the rows that their problems were read from.

        Args:
            rollouts: N of them; a group's lie side by side.
            tags: Of the texts.
        """

    def close(self) -> None:
        """Free what it holds; safe to call twice."""


@dataclass(frozen=True)
class CorrectnessTerms(RewardTerms):
    """The reward of each answer and what it is made of; all (N,)."""

    correct: Tensor  # 1 where the answer is right
    formatted: Tensor  # 1 where thought and solution stand between their tags


class CorrectnessReward(TextReward):
    """What traditional RL trains on, and RLT is compared with (RLT, arXiv:2506.08388, section 2).

    Answers are judged as in evaluation: a row has `answer`, or a `solution` that holds one.

    Args:
        right: Reward of a well-formed right answer.
        wrong: Of a well-formed wrong one.
        unformatted: Of one whose thought and solution are not between their tags, whatever it says.
    """

    def __init__(self, right: float = 1.0, wrong: float = -0.5, unformatted: float = -1.0) -> None:
        self.right = right
        self.wrong = wrong
        self.unformatted = unformatted
        self.judge: Judge | None = None  # made when the tags are known

    def __call__(self, rollouts: list[Rollout], tags: TagStyle) -> CorrectnessTerms:
        """See `TextReward`."""
        if self.judge is None:
            self.judge = Judge(tags)
        verdicts = self.judge.judge_all((r.text, reference_of(r.problem)) for r in rollouts)
        correct = torch.tensor([float(verdict.correct) for verdict in verdicts])
        formatted = torch.tensor([float(verdict.formatted) for verdict in verdicts])
        judged = torch.where(correct > 0, self.right, self.wrong)
        reward = torch.where(formatted > 0, judged, self.unformatted)
        return CorrectnessTerms(reward, correct, formatted)

    def close(self) -> None:
        """End the judge's processes."""
        if self.judge is not None:
            self.judge.close()


def reference_of(problem: Problem) -> dict[str, Any]:
    """What the answers to a problem are judged by: the columns of its row, its solution among them."""
    return {"solution": problem.solution, **problem.columns}
