"""What student, teacher and reference say of a step's completions, before the first weight moves.

All completions are read at once, or in waves while an engine samples the others (callbacks/waves.py):

    wave 1 ─▶ Share.add* ─▶ this rank's part ─▶ student*, reference* ─┐
    wave 2 ─▶ Share.add* ─▶ this rank's part ─▶ student*, reference* ─┼─▶ share, scores, references
    ...                                                               ┘

Ranks meet in what is marked *: the first always, the others with sharded weights. What a rank has read, it
also trains on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlt_lightning.models.lora import without_adapter
from rlt_lightning.models.packed import log_probs_of
from rlt_lightning.modules.meter import PhaseCost
from rlt_lightning.modules.scoring import TokenScores, sampled_extents, sampled_sequence
from rlt_lightning.modules.shares import Share
from rlt_lightning.types import Rollout, Rollouts


@dataclass
class Reading:
    """What models have said so far of this rank's share of a step.

    Attributes:
        module: The module with the models, an RLTModule.
        like: The step's settings; its rollouts are not used.
        share: What this rank computes, in the order in which it came.
        scores: What each student says of the completions of the share; empty if the reward asks no model.
        references: The reference's log-probs of each completion, (T,), nats; empty without a KL penalty.
        with_student: Whether the student reads.
        with_reference: Whether the reference reads.
    """

    module: Any
    like: Rollouts
    share: Share
    scores: list[TokenScores] = field(default_factory=list)
    references: list[Tensor] = field(default_factory=list)
    with_student: bool = True
    with_reference: bool = True

    @classmethod
    def of(
        cls,
        module: Any,
        like: Rollouts,
        num_own: int,
        first: int | None = None,
        with_student: bool = True,
        with_reference: bool = True,
    ) -> Reading:
        """Return a reading of nothing yet, in a step with `num_own` completions of this rank's problems.

        `first` is the number of the first of them; None if all ranks have equally many.
        """
        share = Share.of(module, num_own, like.group_size, first)
        return cls(module, like, share, with_student=with_student, with_reference=with_reference)

    def add(self, arrived: dict[int, Rollout]) -> None:
        """Read completions that have come; all ranks call this together.

        Args:
            arrived: Completions of this rank's own problems, by their place among its own.
        """
        with self.module.phase("score") as cost:
            self._add(arrived, cost)

    def _add(self, arrived: dict[int, Rollout], cost: PhaseCost) -> None:
        new = self.share.add(arrived)
        own = self.share.rollouts[new.start : new.stop]
        # A rank without a part of the wave runs what another has, since models may need all ranks.
        rows = own or self.share.spare
        if not rows:
            return
        if self.with_student:
            scores = self.module.token_scores(replace(self.like, rollouts=rows), cost, self.empty_log_probs)
            if own:
                before = self.scores or [TokenScores([], [])] * len(scores)
                pairs = zip(before, scores, strict=True)
                self.scores = [
                    TokenScores(*([*read, *more] for read, more in zip(*pair, strict=True))) for pair in pairs
                ]
        if self.with_reference:
            references = reference_log_probs(self.module, rows, self.like.temperature, cost)
            if own:
                self.references.extend(references)

    @property
    def empty_log_probs(self) -> list[dict[int, Tensor]]:
        """Return what each student has said after an empty explanation, by row; it reads one once a step."""
        rows = [rollout.problem.row for rollout in self.share.rollouts]
        return [dict(zip(rows, one.empty_log_probs, strict=False)) for one in self.scores]

    def in_order(self) -> Reading:
        """Return the same in the order of the completions' numbers, whatever the order of arrival."""
        order = sorted(range(len(self.share.numbers)), key=self.share.numbers.__getitem__)

        def chosen(values: Sequence[Any]) -> list[Any]:
            return [values[i] for i in order] if values else []

        numbers, rollouts = chosen(self.share.numbers), chosen(self.share.rollouts)
        scores = [TokenScores(*map(chosen, one)) for one in self.scores]
        share = replace(self.share, numbers=numbers, rollouts=rollouts)
        return replace(self, share=share, scores=scores, references=chosen(self.references))


def read_all(module: Any, rollouts: Rollouts, with_student: bool = True) -> Reading:
    """Read a step whose completions have all come; `rollouts` are those of this rank's problems."""
    reading = Reading.of(module, rollouts, len(rollouts.rollouts), with_student=with_student)
    reading.add(dict(enumerate(rollouts.rollouts)))
    return reading


@torch.no_grad()
def reference_log_probs(
    module: Any, rows: list[Rollout], temperature: float, cost: PhaseCost
) -> list[Tensor]:
    """Return the reference's log-probs of each row's sampled tokens, (T,); nothing without a KL penalty.

    Args:
        module: The module with the reference, or with a policy whose adapter can be left out.
        rows: N rollouts.
        temperature: Divides the logits.
        cost: Counts the tokens that the reference computes.
    """
    if not module.policy_loss.kl_coef:
        return []
    sequences = [sampled_sequence(row) for row in rows]
    found: list[Tensor] = [torch.empty(0)] * len(rows)
    base = nullcontext(partial(module.run, without_adapter))
    with base if module.reference is None else module.reference.on(module.device) as run:
        for micro_batch, weight in module.plan_forward(sampled_extents(rows)):
            packed = module.packed(sequences, micro_batch)
            cost.count(packed, sequences, micro_batch, weight)
            flat, _ = run(log_probs_of, packed, temperature, module.head)
            lengths = [len(rows[i].completion.token_ids) for i in micro_batch.indices]
            for i, values in zip(micro_batch.indices, flat.split(lengths), strict=True):
                found[i] = values
    return found
