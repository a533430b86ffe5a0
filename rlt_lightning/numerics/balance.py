"""Divide the sequences of a step over ranks, so that no rank has much more to compute than the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

# Improvements stop here: the heaviest rank is then this close to the mean.
CLOSE_ENOUGH = 1.005


def balance_shards(
    families: Sequence[Sequence[int]],
    num_tokens: Sequence[int],
    world_size: int,
    loads: Sequence[int] | None = None,
) -> list[list[int]]:
    """Divide sequences over ranks by their tokens; few families are cut, so most share their prefix whole.

    The sequences stand in a line, family after family, which is cut into parts of equal tokens. Then the
    heaviest and the lightest rank swap or move single sequences for as long as that helps.

    Args:
        families: Numbers of sequences that share a prefix, such as the completions of one problem. Each
            number from 0 to N - 1 stands once.
        num_tokens: The tokens that each sequence costs, (N,).
        world_size: The number of ranks.
        loads: Tokens that each rank has already; None: none.

    Returns:
        The numbers of each rank's sequences, ascending. Every rank has at least one if N >= world_size and
        `loads` is None. Equal arguments always give equal parts.
    """
    loads = list(loads or [0] * world_size)
    line = [i for family in families for i in family]
    parts = cut(line, num_tokens, compute_room(loads, sum(num_tokens[i] for i in line)))
    for rank, part in enumerate(parts):
        loads[rank] += sum(num_tokens[i] for i in part)
    while improve(parts, loads, num_tokens):
        pass
    give_to_idle(parts, num_tokens)
    return [sorted(part) for part in parts]


def compute_room(loads: Sequence[int], num_tokens: int) -> list[float]:
    """Return how many of the tokens each rank should get, so that all that get some end with equal loads."""
    heights, level = sorted(loads), 0.0
    for lowest in range(len(heights), 0, -1):
        level = (num_tokens + sum(heights[:lowest])) / lowest
        if level >= heights[lowest - 1]:
            break
    return [max(0.0, level - load) for load in loads]


def cut(line: Sequence[int], num_tokens: Sequence[int], room: Sequence[float]) -> list[list[int]]:
    """Cut a line of sequences into one part per rank; the middle of a sequence decides who gets it."""
    ends = list(accumulate(room))
    parts: list[list[int]] = [[] for _ in room]
    rank, start = 0, 0
    for i in line:
        middle = start + num_tokens[i] / 2
        while rank < len(ends) - 1 and middle >= ends[rank]:
            rank += 1
        parts[rank].append(i)
        start += num_tokens[i]
    return parts


def improve(parts: list[list[int]], loads: list[int], num_tokens: Sequence[int]) -> bool:
    """Let the heaviest rank give a sequence to the lightest, or swap two; return whether that helped.

    The heaviest rank that has a sequence: with `loads` of before, the very heaviest may have got none.
    """
    givers = [rank for rank, part in enumerate(parts) if part]
    if not givers:
        return False
    heavy, light = max(givers, key=loads.__getitem__), loads.index(min(loads))
    gap = loads[heavy] - loads[light]
    if loads[heavy] * len(loads) <= CLOSE_ENOUGH * sum(loads):
        return False
    # The best exchange moves half of the gap. Number -1 stands for no sequence in return.
    gives = [(num_tokens[i], i) for i in parts[heavy]]
    takes = [(0, -1), *((num_tokens[j], j) for j in parts[light])]
    distance, i, j = min((abs(2 * (given - taken) - gap), i, j) for given, i in gives for taken, j in takes)
    if distance >= gap:
        return False
    moved = num_tokens[i] - (num_tokens[j] if j >= 0 else 0)
    parts[heavy].remove(i)
    parts[light].append(i)
    if j >= 0:
        parts[light].remove(j)
        parts[heavy].append(j)
    loads[heavy] -= moved
    loads[light] += moved
    return True


def give_to_idle(parts: list[list[int]], num_tokens: Sequence[int]) -> None:
    """Give a rank without any sequence the shortest one of the rank that has most of them."""
    for part in parts:
        richest = max(parts, key=len)
        if not part and len(richest) > 1:
            shortest = min(richest, key=lambda i: (num_tokens[i], i))
            richest.remove(shortest)
            part.append(shortest)


def imbalance(loads: Sequence[float]) -> float:
    """Return the heaviest rank's load as a multiple of the mean, at least 1; 1 where nothing is loaded."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
