"""Rewards with groups that are equal by construction, for tests of dynamic sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlt_lightning.rewards import RLTReward
from rlt_lightning.rollouts.columns import REWARD, Table, Term
from rlt_lightning.rollouts.step import StepBatch


class Parity(RLTReward):
    """The RLT reward of rows with an odd number; all completions of an even one earn nothing."""

    extra_names = ("odd",)

    def extra_terms(self, step: StepBatch, rows: Sequence[int]) -> dict[str, Tensor]:
        return {"odd": torch.tensor([float(r.problem.row % 2) for r in step.rollouts(rows)])}

    def __call__(self, *arguments: Any, **options: Any) -> Table:
        *own, extra, empty = arguments
        table = super().__call__(*own, None, empty, **options)
        return table | {Term("odd"): extra["odd"], REWARD: table[REWARD] * extra["odd"]}
