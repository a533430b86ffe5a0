"""Rewards with groups that are equal by construction, for tests of dynamic sampling."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from rlt_lightning.numerics.rewards import RLTReward
from rlt_lightning.types import Rollout


@dataclass(frozen=True)
class Parity(RLTReward):
    """All completions of a row with an even number earn nothing; those of an odd one differ."""

    solution_weight: float = 0.0
    kl_weight: float = 0.0
    format_penalty: float = 0.0
    extra_names: ClassVar[tuple[str, ...]] = ("parity",)

    def extra_terms(self, rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
        values = [sum(r.completion.token_ids) % 97 / 97 if r.problem.row % 2 else 0.0 for r in rollouts]
        return {"parity": torch.tensor(values)}


@dataclass(frozen=True)
class Lethal(Parity):
    """Kills its process when it scores for the `at`th time, counted in a file over all processes of a run."""

    calls: str = ""
    at: int = 0

    def extra_terms(self, rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
        with open(self.calls, "a") as file:
            file.write("x")
        if Path(self.calls).stat().st_size == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().extra_terms(rollouts)
