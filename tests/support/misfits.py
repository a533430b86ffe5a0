"""Classes that a setting can name, but that must be refused there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlt_lightning.rewards import RLTReward
from rlt_lightning.types import Rollout


@dataclass(frozen=True)
class Terms(RLTReward):
    """Whatever a test makes of it."""

    extra_names = ("one", "two")
    kind: str = "right"

    def extra_terms(self, rollouts: Sequence[Rollout]) -> dict[str, torch.Tensor]:
        count = len(rollouts)
        one, two = torch.arange(count), torch.full((count,), 0.5)
        made: dict[str, Any] = {
            "right": {"two": two, "one": one},
            "missing": {"one": one},
            "column": {"one": one[:, None], "two": two},
            "mean": {"one": one, "two": two.mean()},
            "list": {"one": one, "two": two.tolist()},
            "none": None,
        }
        return made[self.kind]
