"""A step's completions, with what models computed of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlt_lightning.modules.scorer import TokenScores, collect_empty_scores
from rlt_lightning.numerics.advantages import split_groups, zero_std_groups
from rlt_lightning.numerics.packing import to_padded
from rlt_lightning.numerics.transfers import upload
from rlt_lightning.rollouts.dynamic_sampling import RefillCounts
from rlt_lightning.rollouts.request import RolloutRequest
from rlt_lightning.rollouts.shards import Shards
from rlt_lightning.types import Completion, Problem, Rollout, Rollouts, Scores


@dataclass
class ScoredCompletions:
    """The completions of a request, numbered group after group; every rank has all of them and their rewards.

    Example:
        4 problems with 2 completions each on 2 ranks: rank 1 rewards the numbers 4 to 7, those of its own
        problems, and may have the shard 0, 5, 7 if completion 0 is short.

    Attributes:
        request: Where they come from.
        shards: Divides them over ranks.
        own: The numbers of this rank's problems: it rewards them, logs and records them.
        shard: The numbers that this rank computes, ascending.
        students: What the students computed of each completion of the shard; at last of all.
        references: The reference's log-probs of each completion of the shard, (T,), nats; none without a KL
            penalty.
        rewards: (N,), alike on every rank.
        scores: Rewards and terms of `own`; None if this rank has none.
        counts: What dynamic sampling has cost.
        stds: Standard deviation of the rewards of each group, by request; those that were replaced included.
        dropped: The completions that dynamic sampling replaced: problem, number in the group, completion.
    """

    request: RolloutRequest
    shards: Shards
    shard: list[int] = field(default_factory=list)
    students: dict[int, tuple[TokenScores, ...]] = field(default_factory=dict)
    references: dict[int, Tensor] = field(default_factory=dict)
    rewards: Tensor = field(default_factory=lambda: torch.empty(0))
    scores: Scores | None = None

    def __post_init__(self) -> None:
        self.group_size = self.request.num_completions
        # Where each completion comes from: other requests bring some of them in dynamic sampling.
        self.sources = [(self.request, n) for n in range(len(self.request.rows) * self.group_size)]
        self.own = self.request.own_numbers
        self.counts = RefillCounts(len(self.request.rows))
        self.stds: list[Tensor] = []
        self.dropped: list[tuple[Problem, int, Completion]] = []

    def build_rollouts(self, numbers: Sequence[int]) -> list[Rollout]:
        """Return completions attached to their problems."""
        return [request.build_rollout(n) for request, n in (self.sources[number] for number in numbers)]

    def build_own_rollouts(self) -> Rollouts:
        """Return the completions of this rank's problems, as callbacks get them."""
        version, temperature = self.request.policy_version, self.request.sampling.temperature
        return Rollouts(self.build_rollouts(self.own), self.group_size, version, temperature)

    def divide(self, numbers: Sequence[int]) -> list[int]:
        """Add completions to the shards; return the numbers of this rank's part."""
        sources = ((number, *self.sources[number]) for number in numbers)
        part = self.shards.divide({number: request.count_tokens(n) for number, request, n in sources})
        self.shard = sorted([*self.shard, *part])
        return part

    def add(
        self, part: Sequence[int], students: Sequence[tuple[TokenScores, ...]], references: Sequence[Tensor]
    ) -> None:
        """Keep what models computed of a part of the shard; of a dummy nothing is kept.

        Args:
            part: The numbers.
            students: What the students computed of each.
            references: The reference's log-probs of each; none without a KL penalty.
        """
        if part:
            self.students |= dict(zip(part, students, strict=True))
            self.references |= dict(zip(part, references, strict=bool(references)))

    def reference_log_probs(self, numbers: Sequence[int]) -> Tensor | None:
        """Return the reference's log-probs of completions of the shard, (n, T), padded; None without any."""
        if not self.references:
            return None
        found = [self.references[number] for number in numbers]
        return to_padded(torch.cat(found), [len(one) for one in found])[0]

    def collect_known_empty(self) -> dict[int, tuple[Tensor, ...]]:
        """Return what students computed of empty explanations for earlier chunks, by the problem's row."""
        return collect_empty_scores(self.build_rollouts(list(self.students)), list(self.students.values()))

    def list_scores_of_own(self) -> list[tuple[TokenScores, ...]]:
        """Return what the students computed of `own`, the same for equal completions of a problem.

        Elsewhere in a packed row, or from the engine, the same tokens have log-probs that differ by rounding.
        """
        firsts: dict[tuple[int, ...], tuple[TokenScores, ...]] = {}
        scores = []
        for number in self.own:
            request, n = self.sources[number]
            tokens = (number // self.group_size, *request.completions[n].token_ids)
            scores.append(firsts.setdefault(tokens, self.students[number]))
        return scores

    def divide_again(self, shards: Shards) -> list[int]:
        """Divide all completions, after some were replaced; return the numbers of this rank's shard."""
        self.shards, self.shard, self.references = shards, [], {}
        return self.divide(range(len(self.sources)))

    def set_rewards(self, rewards: Tensor) -> None:
        """Keep the rewards, (N,), alike on every rank."""
        self.rewards, self.stds = rewards, [split_groups(rewards, self.group_size).std(dim=1)]

    def find_flat_groups(self, min_std: float) -> list[int]:
        """Return the places of the groups whose rewards are all equal, or differ by less than `min_std`."""
        flat = zero_std_groups(self.rewards, self.group_size)
        flat |= split_groups(self.rewards, self.group_size).std(dim=1) < min_std
        return [place for place, is_flat in enumerate(flat.tolist()) if is_flat]

    def replace(self, others: ScoredCompletions) -> None:
        """Put the groups of another request into its places; how many there are stays the same."""
        size, places = self.group_size, others.request.places
        self.rewards = self.rewards.clone()
        for group, place in enumerate(places):
            old, new = (slice(i * size, (i + 1) * size) for i in (place, group))
            self.dropped += [
                (request.problems[number // size], number % size, request.completions[number])
                for request, number in self.sources[old]
            ]
            self.counts.dropped_tokens += sum(
                request.sum_tokens([number]) for request, number in self.sources[old]
            )
            self.sources[old] = others.sources[new]
            self.rewards[old] = others.rewards[new]
        self.stds += others.stds
        self.counts.rounds += 1
        self.counts.dropped_groups += len(places)
        if others.scores is not None:
            assert self.scores is not None
            first = self.own[0] // size
            own = [places[number // size] - first for number in others.own[::size]]
            rows = find_replaced_rows(len(self.own) // size, own, size)
            self.scores = merge_rows(self.scores, others.scores, rows)


def find_replaced_rows(num_groups: int, places: Sequence[int], size: int) -> list[int]:
    """Return positions in old and new values one after the other: the new groups stand in these places.

    Example:
        find_replaced_rows(3, [1], size=2) is [0, 1, 6, 7, 4, 5].
    """
    groups = {place: num_groups + number for number, place in enumerate(places)}
    return [groups.get(place, place) * size + i for place in range(num_groups) for i in range(size)]


def merge_rows(old: Any, new: Any, rows: list[int]) -> Any:
    """Return the values at some positions of two tensors or lists one after the other.

    Of a data class or a dictionary the values of each field; what has no value per row, such as an empty
    list, stays.
    """
    if is_dataclass(old) and not isinstance(old, type):
        names = [field.name for field in fields(old)]
        columns = {name: merge_rows(getattr(old, name), getattr(new, name), rows) for name in names}
        return replace(old, **columns)
    if isinstance(old, dict):
        return {name: merge_rows(values, new[name], rows) for name, values in old.items()}
    if isinstance(old, Tensor):
        return torch.cat([old, new])[upload(rows, old.device)]
    if isinstance(old, list) and len(old) == len(rows):
        both = [*old, *new]
        return [both[row] for row in rows]
    return old
