"""r_KL as a credit of each token in place of one number: arms `token_kl_…` of finding.py.

The advantages are those of r_SS and format. Each token of an explanation loses its own KL, in nats, and with
`to_go` that of the later tokens too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.credits import RewardCredit, TokenCredit
from rlt_lightning.rewards import RLTReward
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.step import StepBatch


@dataclass(frozen=True)
class TokenKLReward(RLTReward):
    """RLT's reward without r_KL, which becomes a token column.

    Args:
        token_weight: Weight of a token's KL.
        to_go: Let a token also lose the KL of the tokens after it.
    """

    kl_weight: float = 0.0
    token_weight: float = 1.0
    to_go: bool = False

    def measure(self, step: StepBatch, rows: Sequence[int], student: Student) -> dict[str, Tensor]:
        """See `Reward.measure`."""
        table = super().measure(step, rows, student)
        step.put_tokens("token_kl", rows, [self.spread(step, row, step.tokens["kl"][row]) for row in rows])
        return table

    def spread(self, step: StepBatch, row: int, kl: Tensor) -> Tensor:
        """Return what each sampled token loses, (T,), from the KL of its explanation's tokens, (K,)."""
        lost = torch.zeros(len(step.token_ids(row)), dtype=kl.dtype, device=kl.device)
        lost[: len(kl)] = -self.token_weight * (kl.flip(0).cumsum(0).flip(0) if self.to_go else kl)
        return lost


class TokenKLModule(RLTModule):
    """RLT with both credits."""

    credit = RewardCredit() + TokenCredit("token_kl")
