"""Add a term to the RLT reward: a penalty for hurdles, solution tokens that the student finds unlikely.

    r = RLT reward - hurdle_weight * fraction of solution tokens with log p_student < threshold

Run: PYTHONPATH=examples rlt fit --config laptop/rlt --model.reward hurdle_reward.HurdleReward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rlt_lightning.rewards import RLTReward
from rlt_lightning.rollouts.step import StepBatch


@dataclass(frozen=True)
class HurdleReward(RLTReward):
    """Punish solution tokens that the student finds very unlikely, however many others are likely.

    Args:
        hurdle_weight: Penalty of a solution that has nothing else.
        threshold: Log-prob below which a token is a hurdle, nats.
    """

    extra_names = ("hurdles",)

    hurdle_weight: float = 1.0
    threshold: float = -3.0

    def extra_terms(self, step: StepBatch, rows: Sequence[int]) -> dict[str, Tensor]:
        """See `RLTReward.extra_terms`."""
        log_probs, mask = step.pad("solution", rows)  # (n, S)
        hurdles = (mask & (log_probs < self.threshold)).sum(dim=1) / mask.sum(dim=1)
        return {"hurdles": -self.hurdle_weight * hurdles}
