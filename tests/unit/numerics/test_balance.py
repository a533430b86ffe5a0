"""Sequences are divided over ranks so that all have about equally many tokens."""

from __future__ import annotations

import math
import random

import pytest

from rlt_lightning.numerics.balance import balance_shards, compute_room, imbalance

GROUP_SIZE = 64


def lengths_of_step(seed: int) -> list[list[int]]:
    """Return the tokens of each problem's completions; problems differ as well as completions."""
    draws = random.Random(seed)
    groups = []
    for _ in range(16):
        typical = draws.lognormvariate(math.log(3500), 0.5)
        drawn = (draws.lognormvariate(math.log(typical), 0.5) for _ in range(GROUP_SIZE))
        groups.append([int(min(16384, length)) for length in drawn])
    return groups


def lognormal_step(seed: int) -> tuple[list[list[int]], list[int]]:
    """Return a step like the released recipe's: its families, and the tokens of its sequences."""
    tokens = [length for group in lengths_of_step(seed) for length in group]
    return [list(range(first, first + GROUP_SIZE)) for first in range(0, len(tokens), GROUP_SIZE)], tokens


def loads_of(parts: list[list[int]], tokens: list[int]) -> list[int]:
    return [sum(tokens[i] for i in part) for part in parts]


def test_a_division_by_hand() -> None:
    # In line 6 2 | 2 2 is 8 and 4; the heavy rank gives a 2.
    assert balance_shards([[0, 1], [2, 3]], [6, 2, 2, 2], 2) == [[0], [1, 2, 3]]
    # Equal families stay whole.
    assert balance_shards([[0, 1], [2, 3]], [5, 5, 5, 5], 2) == [[0, 1], [2, 3]]
    # One swap makes 10 and 6 equal: 5 for 3.
    assert sorted(loads_of(balance_shards([[0, 1], [2, 3]], [5, 5, 3, 3], 2), [5, 5, 3, 3])) == [8, 8]
    assert balance_shards([[0, 1]], [4, 4], 1) == [[0, 1]]


def test_what_ranks_have_already_counts() -> None:
    assert compute_room([10, 0], 4) == [0, 4]
    assert compute_room([10, 0], 20) == [5, 15]
    # 8 + 4 and 4 + 4 are as good as 8 and 4 + 4 + 4, and no rank is idle.
    assert balance_shards([[0, 1, 2]], [4, 4, 4], 2, loads=[8, 0]) == [[0], [1, 2]]
    parts = balance_shards([[0, 1, 2, 3]], [2, 2, 2, 2], 2, loads=[4, 0])
    assert loads_of(parts, [2, 2, 2, 2]) == [2, 6]


def test_the_heaviest_rank_may_get_nothing_of_a_chunk() -> None:
    assert balance_shards([[0]], [10], 2, loads=[100, 0]) == [[], [0]]
    assert balance_shards([], [], 2, loads=[5, 3]) == [[], []]  # the last chunk may be empty
    # The two others share it; then the idle rank gets one of two.
    assert balance_shards([[0, 1, 2]], [6, 3, 3], 3, loads=[100, 0, 1]) == [[1], [0], [2]]


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_no_rank_has_five_per_cent_more_than_the_mean(world_size: int) -> None:
    for seed in range(3):
        families, tokens = lognormal_step(seed)
        parts = balance_shards(families, tokens, world_size)
        assert sorted(i for part in parts for i in part) == list(range(len(tokens)))
        assert imbalance(loads_of(parts, tokens)) <= 1.05
        assert balance_shards(families, tokens, world_size) == parts
        # Few families are cut: a prefix is computed by about two ranks, not by all.
        pieces = sum(len({i // 64 for i in part}) for part in parts)
        assert pieces <= len(families) + 2 * world_size
    # By whole problems, as the loader divides them, it is not so.
    by_problem = [sum(tokens[i] for i in family) for family in lognormal_step(0)[0]]
    count = 16 // world_size
    assert imbalance([sum(by_problem[i : i + count]) for i in range(0, 16, count)]) > 1.05


@pytest.mark.parametrize("num_sequences", [1, 3, 4, 9])
def test_every_rank_gets_a_sequence_if_there_are_enough(num_sequences: int) -> None:
    tokens = [1000, *[1] * (num_sequences - 1)]
    parts = balance_shards([range(num_sequences)], tokens, 4)
    assert sorted(i for part in parts for i in part) == list(range(num_sequences))
    assert sum(bool(part) for part in parts) == min(4, num_sequences)


def test_imbalance_is_the_heaviest_rank_against_the_mean() -> None:
    assert imbalance([3, 1, 2, 2]) == 1.5
    assert imbalance([0, 0]) == 1.0
