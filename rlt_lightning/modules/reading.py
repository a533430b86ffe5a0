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
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from rlt_lightning.modules.phases import PhaseStats
from rlt_lightning.modules.scorer import CompletionScores, TokenScores, known_empty
from rlt_lightning.modules.shares import Share
from rlt_lightning.types import Rollout, Rollouts


@dataclass
class Reading:
    """What models have said so far of this rank's share of a step.

    Attributes:
        module: The module with the models, an RLTModule.
        like: The step's settings; its rollouts are not used.
        share: What this rank computes, in the order in which it came.
        scores: What each student says of each completion of the share.
        references: The reference's log-probs of each completion, (T,), nats; empty without a KL penalty.
        with_student: Whether the student reads.
        with_reference: Whether the reference reads.
    """

    module: Any
    like: Rollouts
    share: Share
    scores: list[tuple[TokenScores, ...]] = field(default_factory=list)
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

    def _add(self, arrived: dict[int, Rollout], cost: PhaseStats) -> None:
        new = self.share.add(arrived)
        own = self.share.rollouts[new.start : new.stop]
        # A rank without a part of the wave runs what another has, since models may need all ranks.
        rows = own or self.share.spare
        if not rows:
            return
        if self.with_student:
            read = self.share.rollouts[: new.start]
            known = known_empty(read, [CompletionScores(one) for one in self.scores])
            scores = self.module.scorer.score_students(rows, self.like.temperature, known, cost)
            if own:
                self.scores.extend(scores)
        if self.with_reference:
            references = self.module.scorer.reference_log_probs(rows, self.like.temperature, cost)
            if own:
                self.references.extend(references)

    def in_order(self) -> Reading:
        """Return the same in the order of the completions' numbers, whatever the order of arrival."""
        order = sorted(range(len(self.share.numbers)), key=self.share.numbers.__getitem__)

        def chosen(values: Sequence[Any]) -> list[Any]:
            return [values[i] for i in order] if values else []

        numbers, rollouts = chosen(self.share.numbers), chosen(self.share.rollouts)
        scores = chosen(self.scores)
        share = replace(self.share, numbers=numbers, rollouts=rollouts)
        return replace(self, share=share, scores=scores, references=chosen(self.references))


def read_all(module: Any, rollouts: Rollouts, with_student: bool = True) -> Reading:
    """Read a step whose completions have all come; `rollouts` are those of this rank's problems."""
    reading = Reading.of(module, rollouts, len(rollouts.rollouts), with_student=with_student)
    reading.add(dict(enumerate(rollouts.rollouts)))
    return reading
