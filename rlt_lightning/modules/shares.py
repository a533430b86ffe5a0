"""A rank's share of a step: completions of any problem, so that all ranks compute equally many tokens.

The loader gives each rank its own problems, whose completions are of unlike length. So:

    own rollouts ──gather──▶ everybody's ──divide (numerics/balance.py)──▶ this rank's share
                                                                           student, reference, update
    own rewards, whole groups ◀──gather── what models say of tokens ◀──────┘
    own advantages            ──gather──▶ the share's, for the update

A single process has all of it, and gathers nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from rlt_lightning.modules.scorer import CompletionScores, TokenScores
from rlt_lightning.numerics.balance import divide
from rlt_lightning.types import InputError, Rollout

T = TypeVar("T")


class StepTotals(NamedTuple):
    """What the loss divides by: counts over all ranks and micro-batches of a step."""

    num_sequences: float
    num_tokens: float


@dataclass
class Share:
    """What one rank computes of a step. Completions are numbered over all ranks, problem after problem.

    Attributes:
        rank: This rank.
        world_size: The number of ranks.
        num_own: Completions of this rank's own problems.
        first: The number of the first of them.
        group_size: Completions of a problem.
        shares_prefix: Whether completions of a problem compute its prompt once.
        numbers: The numbers of the completions in this rank's share.
        rollouts: These completions, in the order of `numbers`.
        loads: The tokens of each rank's share.
        spare: A completion of another rank, where the last `add` brought some, but none for this rank.
    """

    rank: int
    world_size: int
    num_own: int
    first: int
    group_size: int
    shares_prefix: bool
    numbers: list[int] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    spare: list[Rollout] = field(default_factory=list)

    @classmethod
    def of(cls, module: LightningModule, num_own: int, group_size: int, first: int | None = None) -> Share:
        """Return the share of a module's rank, into which nothing has come yet.

        `first` is None if all ranks have equally many completions of their own.
        """
        shares_prefix = module.layout in ("auto", "shared_prefix")
        rank, world_size = module.trainer.global_rank, module.trainer.world_size
        first = rank * num_own if first is None else first
        return cls(rank, world_size, num_own, first, group_size, shares_prefix)

    def add(self, arrived: dict[int, Rollout]) -> range:
        """Divide completions over the ranks, which call this together; return the places of this rank's part.

        Args:
            arrived: Completions of this rank's own problems, by their place among its own.
        """
        self.loads = self.loads or [0] * self.world_size
        if self.world_size == 1:
            gathered = {self.first + place: rollout for place, rollout in arrived.items()}
        else:
            packed = {self.first + place: with_arrays(rollout) for place, rollout in arrived.items()}
            gathered = {number: r for part in gather(packed, self.world_size) for number, r in part.items()}
        numbers = sorted(gathered)
        tokens = [self.tokens_of(gathered[number]) for number in numbers]
        families: dict[int, list[int]] = {}
        for place, number in enumerate(numbers):
            families.setdefault(number // self.group_size, []).append(place)
        parts = divide(list(families.values()), tokens, self.world_size, self.loads)
        for rank, part in enumerate(parts):
            self.loads[rank] += sum(tokens[i] for i in part)
        before = len(self.numbers)
        for i in parts[self.rank]:
            self.numbers.append(numbers[i])
            self.rollouts.append(with_lists(gathered[numbers[i]]))
        self.spare = [] if parts[self.rank] else [with_lists(gathered[number]) for number in numbers[:1]]
        return range(before, len(self.numbers))

    def tokens_of(self, rollout: Rollout) -> int:
        """Return the tokens that a completion costs, with its part of the prompt."""
        prompt = len(rollout.problem.teacher_prompt)
        own = -(-prompt // self.group_size) if self.shares_prefix else prompt
        return own + len(rollout.completion.token_ids)

    def scores_of_own(self, found: list[tuple[TokenScores, ...]]) -> list[CompletionScores]:
        """Turn the numbers of this rank's share into those of its own problems, by asking all ranks.

        Args:
            found: Of each completion what each student computed, in the order of `numbers`, ascending.
        """
        scores = [CompletionScores(one) for one in found]
        if self.world_size == 1:
            return scores
        on_cpu = {
            n: one.to(torch.device("cpu"), copy=True) for n, one in zip(self.numbers, scores, strict=False)
        }
        by_number = {number: row for part in gather(on_cpu, self.world_size) for number, row in part.items()}
        return [by_number[self.first + place] for place in range(self.num_own)] if by_number else []

    def of_own(self, values: Tensor) -> Tensor:
        """Turn a number for each completion of this share into those of its own problems, (num_own,)."""
        numbered = dict(zip(self.numbers, values.tolist(), strict=True))
        if self.world_size > 1:
            numbered = {n: value for part in gather(numbered, self.world_size) for n, value in part.items()}
        own = [numbered[self.first + place] for place in range(self.num_own)]
        return torch.tensor(own, dtype=values.dtype, device=values.device)

    def of_share(self, own: Tensor) -> Tensor:
        """Turn a number for each completion of this rank's own problems, (num_own,), into the share's."""
        if self.world_size == 1:
            return own[torch.tensor(self.numbers, device=own.device)]
        everybody = torch.cat([part.to(own.device) for part in gather(own.cpu(), self.world_size)])
        return everybody[torch.tensor(self.numbers, device=own.device)]


def gather(own: T, world_size: int) -> list[T]:
    """Return what each rank gave, in rank order."""
    parts: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(parts, own)
    return parts


def with_arrays(rollout: Rollout) -> Rollout:
    """Store a completion's numbers in arrays, which travel faster than lists."""
    completion = rollout.completion
    log_probs = completion.log_probs
    arrays: dict[str, Any] = {"token_ids": np.array(completion.token_ids, dtype=np.int32)}
    arrays["log_probs"] = None if log_probs is None else np.array(log_probs, dtype=np.float64)
    return replace(rollout, completion=replace(completion, **arrays))


def with_lists(rollout: Rollout) -> Rollout:
    """Undo `with_arrays`."""
    arrays: dict[str, Any] = vars(rollout.completion)
    lists: Any = {name: array.tolist() for name, array in arrays.items() if isinstance(array, np.ndarray)}
    return replace(rollout, completion=replace(rollout.completion, **lists)) if lists else rollout


def require_group(group_size: int) -> None:
    """Check that a group has more than one completion."""
    if group_size < 2:
        raise InputError(
            f"model.group_size must be at least 2, but got {group_size}: a group of one has no baseline, "
            "so every advantage would be zero. Raise it; the paper uses 64."
        )
