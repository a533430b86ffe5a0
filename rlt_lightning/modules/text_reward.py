"""Rewards that look at a completion's text alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from rlt_lightning.numerics.rewards import Reward, RewardTerms
from rlt_lightning.types import Rollout

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
