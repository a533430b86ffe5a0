"""Which rank computes which of a step's completions: its shard. All ranks compute equally many tokens.

Every rank has all completions of a step, and finds all shards by itself:

    completions 0 … N-1, alike on every rank ─▶ Shards.divide, by tokens ─▶ this rank's numbers
                                                                              │ student, reference, update
    what models compute of all of them ◀═ one gather over ranks ═ of its own ◀┘

Completions that come in chunks are divided chunk by chunk. With sharded weights every forward waits for all
ranks, so a rank without a part of a chunk computes another's completion as a dummy.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlt_lightning.numerics.balance import balance_shards, imbalance


class Shards:
    """Divides a step's completions over ranks.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        group_size: Completions of a problem.
        shares_prefix: Whether the completions of a problem compute its prompt once.
    """

    def __init__(self, rank: int, world_size: int, group_size: int, shares_prefix: bool) -> None:
        self.rank = rank
        self.world_size = world_size
        self.group_size = group_size
        self.shares_prefix = shares_prefix
        self.loads = [0] * world_size  # tokens that each rank has
        self.longest = 0  # tokens of the longest completion, of all ranks

    def divide(self, lengths: Mapping[int, tuple[int, int]]) -> list[int]:
        """Divide completions over the ranks, after those of earlier calls; return this rank's, ascending.

        Args:
            lengths: The tokens of prompt and completion, by the completion's number. The same on every rank.
        """
        numbers = sorted(lengths)
        tokens = [self._count(*lengths[number]) for number in numbers]
        families: dict[int, list[int]] = {}
        for place, number in enumerate(numbers):
            families.setdefault(number // self.group_size, []).append(place)
        parts = balance_shards(list(families.values()), tokens, self.world_size, self.loads)
        for rank, part in enumerate(parts):
            self.loads[rank] += sum(tokens[i] for i in part)
        self.longest = max([self.longest, *(num_completion for _, num_completion in lengths.values())])
        return [numbers[i] for i in parts[self.rank]]

    def _count(self, num_prompt: int, num_completion: int) -> int:
        """Return the tokens that a completion costs, with its part of the prompt."""
        return (-(-num_prompt // self.group_size) if self.shares_prefix else num_prompt) + num_completion

    @property
    def imbalance(self) -> float:
        """Return the heaviest rank's tokens as a multiple of the mean, at least 1."""
        return imbalance(self.loads)
