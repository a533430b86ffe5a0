"""Classes that a setting can name, but that must be refused there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlt_lightning.engines import HFEngine
from rlt_lightning.rewards import RLTReward
from rlt_lightning.types import Rollout


class NoBase:
    """Neither a reward nor a callback."""


class NoMethods:
    """Some of an engine."""

    def start(self, model: Any, tokenizer: Any) -> None:
        """Without the folder."""

    def close(self) -> None:
        """Nothing."""


class NoAnnotations(HFEngine):
    """An engine whose methods do not say what they take."""

    def start(self, model, tokenizer, folder):  # type: ignore[no-untyped-def]
        """As HFEngine does."""


@dataclass(frozen=True)
class TakenName(RLTReward):
    """A term that there is already."""

    extra_names = ("kl",)


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
