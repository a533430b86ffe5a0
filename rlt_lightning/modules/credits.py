"""Credits: how much each sampled token gains, in place of one advantage of the whole completion.

    RewardCredit             the completion's advantage, alike at each token
    RatioCredit(by, weight)  how much likelier it is to another model or in another view: log p_by - log p
    TokenCredit(name)        what the reward says of the token: its column of this name
    a + b, 0.1 * a           their sum, and a multiple

A `PolicyGradient` has one; `RLTModule.credit` is the one of RLT.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlt_lightning.modules.passes import Micro, Values
from rlt_lightning.numerics.divergence import sampled_advantages
from rlt_lightning.numerics.packing import to_padded
from rlt_lightning.numerics.transfers import upload
from rlt_lightning.rollouts.step import POLICY, ScoringPass, StepBatch
from rlt_lightning.types import Rollout

# The token column of the policy's log-probs at the start of an iteration with several updates.
OLD = "old"


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch of n rows: the policy's values, and everything that was known before.

    Attributes:
        micro: The micro-batch.
        computed: The policy's values, (M,), the only ones with gradient.
        log_probs: The same, (n, T), padded with 0: log-probs, or divergences.
        token_mask: True where the policy has computed something, (n, T).
        stale: Whether older weights sampled.
    """

    micro: Micro
    computed: Values
    log_probs: Tensor
    token_mask: Tensor
    stale: bool

    @classmethod
    def of(cls, micro: Micro, computed: Values, global_step: int) -> LossInputs:
        """Return the inputs of a micro-batch's loss."""
        padded, token_mask = to_padded(computed.values, [scoring.num_scored for scoring in micro.passes])
        return cls(micro, computed, padded, token_mask, micro.step.policy_version < global_step)

    @property
    def step(self) -> StepBatch:
        """Return the step."""
        return self.micro.step

    @property
    def rollouts(self) -> list[Rollout]:
        """Return the completions."""
        return self.step.rollouts(self.micro.rows)

    @property
    def advantages(self) -> Tensor:
        """Return the advantages, (n,)."""
        assert self.step.advantages is not None
        return self.step.advantages[upload(self.micro.rows, self.step.advantages.device)]

    @property
    def num_scored(self) -> float:
        """Return how many tokens the term scores in the whole update; 1 if there is none."""
        return max(1.0, self.micro.num_scored)

    def pad_column(self, name: str) -> Tensor:
        """Return a token column of these rows, (n, T)."""
        return self.step.pad(name, self.micro.rows)[0]

    @property
    def old_log_probs(self) -> Tensor:
        """Return the policy's log-probs at the start of the iteration, (n, T), without gradient.

        These are `log_probs` unless the iteration updates the policy several times.
        """
        return self.pad_column(OLD) if OLD in self.step.tokens else self.log_probs.detach()

    @property
    def engine_log_probs(self) -> Tensor | None:
        """Return the log-probs with which the engine sampled, (n, T); None if it did not report them."""
        parts = [scoring.sampled for scoring in self.micro.passes]
        return pad_engine_log_probs(self.rollouts, self.log_probs, parts)


def pad_engine_log_probs(
    rollouts: Sequence[Rollout], like: Tensor, parts: Sequence[slice] | None = None
) -> Tensor | None:
    """Return the engine's log-probs of the sampled tokens, (n, T), padded with 0 like `like`.

    Args:
        rollouts: n completions.
        like: A tensor of the type and on the device that are wanted.
        parts: Which tokens of each; None: all.

    Returns:
        None if the engine did not send all of them.
    """
    values = [rollout.completion.log_probs for rollout in rollouts]
    if any(value is None for value in values):
        return None
    parts = parts or [slice(None)] * len(rollouts)
    tensors = [
        torch.tensor((value or [])[part], dtype=like.dtype, device="cpu")
        for value, part in zip(values, parts, strict=True)
    ]
    return upload(pad_sequence(tensors, batch_first=True), like.device)


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
        weight: Of a nat.
        temperature: Divides the other's logits; None: that of sampling.
    """

    def __init__(self, by: str = POLICY, weight: float = 1.0, temperature: float | None = None) -> None:
        self.by, self.weight, self.temperature = by, weight, temperature
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
        return self.weight * credit

    def sum_log_probs(self, step: StepBatch, rows: Sequence[int], like: Tensor) -> Tensor:
        """Return the other's log-prob of what it reads of each row, (n,), nats; of nothing 0, like `like`."""
        theirs = step.tokens.get(self.name, {})
        return torch.stack([theirs[row].sum() if row in theirs else like.new_zeros(()) for row in rows])


class TokenCredit(Credit):
    """What the reward says of each token, such as whether a step is right.

    Args:
        name: The reward's token column (`StepBatch.put_tokens`).
        weight: Of its values.
    """

    def __init__(self, name: str, weight: float = 1.0) -> None:
        self.columns, self.weight = (name,), weight

    def __call__(self, inputs: LossInputs) -> Tensor:
        """See `Credit`."""
        return self.weight * inputs.pad_column(self.columns[0]).to(inputs.log_probs)
