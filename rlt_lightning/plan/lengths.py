"""Simulate the lengths of a step's sequences, and how much of them each rank gets.

Real lengths differ, so ranks have unequal work. A length is drawn as

    tokens = min(limit, scale * exp(between + within)),   between ~ N(0, 0.47^2), within ~ N(0, 0.47^2)

where `between` is common to all completions of a problem, and `scale` gives the step the mean that the plan
assumes. The seed is fixed: equal settings give equal plans.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rlt_lightning.numerics.balance import divide, imbalance
from rlt_lightning.numerics.packing import Extent, MicroBatch, micro_batches
from rlt_lightning.plan.inputs import Step

NUM_STEPS = 4  # simulated steps whose mean counts


@dataclass(frozen=True)
class Load:
    """What one rank computes in a pass over its sequences."""

    tokens: int  # in its rows: a shared prompt counts once a row
    pairs: float  # of tokens where one attends to the other
    scored: int  # tokens that the head scores


@lru_cache(maxsize=64)
def simulated_lengths(step: Step, seed: int) -> tuple[int, ...]:
    """Return the tokens of every completion of a step, problem after problem."""
    draw = random.Random(seed)
    factors = []
    for _ in range(step.prompts):
        problem = draw.gauss(0, step.spread_between)
        factors += [math.exp(problem + draw.gauss(0, step.spread_within)) for _ in range(step.group_size)]
    goal = min(step.mean_completion_length, step.completion_length) * len(factors)
    low, high = 0.0, goal / min(factors) + step.completion_length
    for _ in range(50):
        scale = (low + high) / 2
        total = sum(min(step.completion_length, scale * factor) for factor in factors)
        low, high = (scale, high) if total < goal else (low, scale)
    return tuple(max(1, round(min(step.completion_length, high * factor))) for factor in factors)


def shares(step: Step, lengths: Sequence[int]) -> list[list[int]]:
    """Return the numbers of each rank's sequences: balanced by tokens, or whole problems in turn."""
    size, world = step.group_size, step.num_processes
    families = [range(i, i + size) for i in range(0, len(lengths), size)]
    if step.balanced:
        return divide(families, lengths, world)
    return [[i for family in families[rank::world] for i in family] for rank in range(world)]


@lru_cache(maxsize=64)
def rank_loads(step: Step, solution: int = 0, seed: int = 0) -> tuple[Load, ...]:
    """Return what each rank computes in one simulated step, by the rows that the packer makes.

    Args:
        step: The step.
        solution: Tokens of the solution that each completion is followed by: the student's sequences. The
            student's prompt has them not.
        seed: The number of the simulated step.
    """
    lengths = simulated_lengths(step, seed)
    prompt = max(0, step.mean_prompt_length - solution)
    found = []
    for share in shares(step, lengths):
        extents = [Extent(i // step.group_size, prompt, lengths[i] + solution) for i in share]
        rows = micro_batches(extents, step.micro_batch_tokens, step.layout)
        found.append(
            Load(
                tokens=sum(row.num_tokens for row in rows),
                pairs=sum(pairs_of(row, extents) for row in rows),
                scored=sum(extent.num_rest for extent in extents),
            )
        )
    return tuple(found)


def slowest_rank(step: Step, num_steps: int = NUM_STEPS) -> float:
    """Return the tokens of the slowest rank as a multiple of the mean, over simulated steps."""
    found = [imbalance([load.tokens for load in rank_loads(step, 0, seed)]) for seed in range(num_steps)]
    return sum(found) / num_steps


def pairs_of(row: MicroBatch, sequences: list[Extent]) -> float:
    """Return the pairs of tokens where one attends to the other: within and between prefix and rests."""
    pairs = 0.0
    for family in row.families:
        prefix = sequences[family[0]].num_prefix
        rests = [sequences[i].num_rest for i in family]
        pairs += prefix * (prefix + 1) / 2 + sum(rest * (rest + 1) / 2 + rest * prefix for rest in rests)
    return pairs
