"""A reward whose values depend only on its seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlt_lightning.rewards import TextReward
from rlt_lightning.tags import TagStyle
from rlt_lightning.types import RewardTerms, Rollout


@dataclass(frozen=True)
class Seeded(RewardTerms):
    seed: Tensor


class SeededReward(TextReward):
    def __call__(self, rollouts: list[Rollout], tags: TagStyle) -> RewardTerms:
        return Seeded(torch.zeros(len(rollouts)), torch.zeros(len(rollouts)))
