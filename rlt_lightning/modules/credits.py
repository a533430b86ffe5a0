"""Credits: how much each sampled token gains, in place of one advantage of the whole completion.

    RewardCredit             the completion's advantage, alike at each token
    RatioCredit(by, weight)  how much likelier it is to another model or in another view: log p_by - log p
    TokenCredit(name)        what the reward says of the token: its column of this name
    a + b, 0.1 * a           their sum, and a multiple

A `PolicyGradient` has one; `RLTModule.credit` is the one of RLT.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlt_lightning.numerics.divergence import sampled_advantages
from rlt_lightning.rollouts.step import POLICY, ScoringPass
from rlt_lightning.types import Rollout

if TYPE_CHECKING:
    from rlt_lightning.modules.losses import LossInputs


class Credit(ABC):
    """A part of the advantages of tokens, without gradient."""

    # The reward's token columns that it reads, and the models that it asks.
    columns: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    def scoring_passes(self, rollout: Rollout) -> dict[str, ScoringPass]:
        """Return what is computed before the update, without gradient."""
        return {}

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> Tensor:
        """Return the credit of n completions, (n,), or of their tokens, (n, T)."""

    def __add__(self, other: Credit) -> Credit:
        return SumOfCredits((self, other), (1.0, 1.0))

    def __rmul__(self, weight: float) -> Credit:
        return SumOfCredits((self,), (weight,))


@dataclass(frozen=True)
class SumOfCredits(Credit):
    """A weighted sum of credits."""

    parts: tuple[Credit, ...]
    weights: tuple[float, ...]

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        """See `Credit`."""
        return tuple(name for part in self.parts for name in part.columns)

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        """See `Credit`."""
        return tuple(name for part in self.parts for name in part.models)

    def scoring_passes(self, rollout: Rollout) -> dict[str, ScoringPass]:
        """See `Credit`."""
        passes: dict[str, ScoringPass] = {}
        for part in self.parts:
            passes |= part.scoring_passes(rollout)
        return passes

    def __call__(self, inputs: LossInputs) -> Tensor:
        """See `Credit`."""
        total = torch.zeros_like(inputs.log_probs)
        for part, weight in zip(self.parts, self.weights, strict=True):
            values = part(inputs)
            total = total + weight * values.view(len(values), -1)
        return total


@dataclass(frozen=True)
class RewardCredit(Credit):
    """The completion's advantage."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        """See `Credit`."""
        return inputs.advantages


@dataclass(frozen=True)
class RatioCredit(Credit):
    """How much likelier each token is to another model, which reads it after `Problem.teacher_view`.

    The mean gradient is that of the reverse KL from that model, one token at a time (`sampled_advantages`).
    The policy's log-probs are those at the start of the iteration. A token that nobody judges gets 0.

    Args:
        by: The model that reads: "policy" in another view, "reference", or the name of a frozen model.
        weight: Of a nat.
        temperature: Divides the other's logits; None: that of sampling.
    """

    by: str = POLICY
    weight: float = 1.0
    temperature: float | None = None

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        """See `Credit`."""
        return (self.by,)

    @property
    def name(self) -> str:
        """Return the name of the other's token column."""
        return f"by/{self.by}"

    def scoring_passes(self, rollout: Rollout) -> dict[str, ScoringPass]:
        """Return the judged tokens as the other model reads them."""
        if not rollout.views:
            return {}
        [view], context = rollout.views[:1], rollout.problem.teacher_view
        scoring = ScoringPass(
            self.by,
            context,
            view.token_ids,
            (len(context), len(context) + len(view.token_ids)),
            family=(self.name, rollout.problem.row),
            temperature=self.temperature,
            what=f"log-prob by {self.by}",
            retokenized=view.spans is not None,
        )
        return {self.name: scoring}

    def __call__(self, inputs: LossInputs) -> Tensor:
        """See `Credit`."""
        own, credit = inputs.old_log_probs, torch.zeros_like(inputs.log_probs)
        theirs = inputs.step.tokens.get(self.name, {})
        for i, (row, rollout) in enumerate(zip(inputs.micro.rows, inputs.rollouts, strict=True)):
            if row in theirs:
                [view], sampled = rollout.views[:1], inputs.micro.passes[i].sampled
                first = view.start - (sampled[0] if sampled else 0)
                part = slice(first, first + view.num_tokens)
                credit[i, part] = sampled_advantages(own[i, part], theirs[row], view.spans)
        return self.weight * credit


@dataclass(frozen=True)
class TokenCredit(Credit):
    """What the reward says of each token, such as whether a step is right.

    Args:
        name: The reward's token column, with a value for each sampled token of a completion, (T,).
        weight: Of its values.
    """

    name: str
    weight: float = 1.0

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        """See `Credit`."""
        return (self.name,)

    def __call__(self, inputs: LossInputs) -> Tensor:
        """See `Credit`."""
        return self.weight * inputs.pad_column(self.name).to(inputs.log_probs)
