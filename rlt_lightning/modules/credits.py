"""Credits: how much each sampled token gains, in place of one advantage of the whole completion.

    RewardCredit             the completion's advantage, alike at each token
    RatioCredit(by)          how much likelier it is to another model or in another view: log p_by - log p
    TokenCredit(name)        what the reward says of the token: its column of this name
    a + b, 0.1 * a           their sum, and a multiple

A `PolicyGradient` has one; `RLTModule.credit` is the one of RLT.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from rlt_lightning.modules.passes import LossInputs
from rlt_lightning.numerics.divergence import sampled_advantages
from rlt_lightning.rollouts.step import POLICY, ScoringPass
from rlt_lightning.types import Rollout


class Credit(ABC):
    """A part of the advantages of tokens, without gradient."""

    # The reward's token columns that it reads, and the models that it asks.
    columns: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    def scoring_passes(self, rollout: Rollout) -> list[ScoringPass]:
        """Return what is computed before the update, without gradient."""
        return []

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> Tensor:
        """Return the credit of n completions, (n,), or of their tokens, (n, T)."""

    def __add__(self, other: Credit) -> Credit:
        return SumOfCredits((self, 1.0), (other, 1.0))

    def __rmul__(self, weight: float) -> Credit:
        return SumOfCredits((self, weight))


class SumOfCredits(Credit):
    """A sum of credits with their weights."""

    def __init__(self, *parts: tuple[Credit, float]) -> None:
        self.parts = parts
        self.columns = tuple(name for part, _ in parts for name in part.columns)
        self.models = tuple(name for part, _ in parts for name in part.models)

    def scoring_passes(self, rollout: Rollout) -> list[ScoringPass]:
        """See `Credit`."""
        return [scoring for part, _ in self.parts for scoring in part.scoring_passes(rollout)]

    def __call__(self, inputs: LossInputs) -> Tensor:
        """See `Credit`."""
        total = torch.zeros_like(inputs.log_probs)
        for part, weight in self.parts:
            values = part(inputs)
            total = total + weight * (values if values.dim() == 2 else values.unsqueeze(1))
        return total


class RewardCredit(Credit):
    """The completion's advantage."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        """See `Credit`."""
        return inputs.advantages


class RatioCredit(Credit):
    """How much likelier each token is to another model, which reads it after `Problem.teacher_view`.

    The mean gradient is that of the reverse KL from that model, one token at a time (`sampled_advantages`).
    The policy's log-probs are those at the start of the iteration. A token that nobody judges gets 0.

    Args:
        by: The model that reads: "policy" in another view, "reference", or the name of a frozen model.
        temperature: Divides the other's logits; None: that of sampling.
    """

    def __init__(self, by: str = POLICY, temperature: float | None = None) -> None:
        self.by, self.temperature = by, temperature
        self.models = (by,)
        self.name = f"by/{by}"  # of the other's token column

    def scoring_passes(self, rollout: Rollout) -> list[ScoringPass]:
        """Return the judged tokens as the other model reads them."""
        if rollout.view is None:
            return []
        view, context = rollout.view, rollout.problem.teacher_view
        scoring = ScoringPass(
            self.by,
            context,
            view.token_ids,
            {self.name: (len(context), len(context) + len(view.token_ids))},
            family=(self.name, rollout.problem.row),
            temperature=self.temperature,
            retokenized=view.spans is not None,
        )
        return [scoring]

    def __call__(self, inputs: LossInputs) -> Tensor:
        """See `Credit`."""
        old, credit = inputs.old_log_probs, torch.zeros_like(inputs.log_probs)
        theirs = inputs.step.tokens.get(self.name, {})
        for i, (row, rollout) in enumerate(zip(inputs.micro.rows, inputs.rollouts, strict=True)):
            if row in theirs and (view := rollout.view) is not None:
                first = view.start - inputs.micro.passes[i].sampled.start
                part = slice(first, first + view.num_tokens)
                credit[i, part] = sampled_advantages(old[i, part], theirs[row], view.spans)
        return credit


class TokenCredit(Credit):
    """What the reward says of each token, such as whether a step is right.

    Args:
        name: The reward's token column (`StepBatch.put_tokens`).
    """

    def __init__(self, name: str) -> None:
        self.columns = (name,)

    def __call__(self, inputs: LossInputs) -> Tensor:
        """See `Credit`."""
        return inputs.pad_column(self.columns[0]).to(inputs.log_probs)
