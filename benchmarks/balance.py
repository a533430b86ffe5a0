"""How uneven the work of ranks is if it is divided by problems, and if it is divided by tokens.

    .venv/bin/python benchmarks/balance.py

A step like the released recipe's: 16 problems, 64 completions each, of lognormal lengths around 5k tokens, at
most 16k. Each division has two figures, the slowest rank's tokens as a multiple of the mean, averaged over
seeds: of all tokens, and of rows by the real packer if ranks wait for each other in every row (with sharded
weights).
"""

from __future__ import annotations

import math
import random
import statistics

from side_by_side import benchmark_parser, finish, read_options

from rlt_lightning.numerics.balance import balance_shards, imbalance
from rlt_lightning.numerics.packing import SequenceLengths, micro_batches, split_to

PROBLEMS, GROUP_SIZE, LIMIT = 16, 64, 16384
PROMPT = 800
GOAL = 1.05


def lengths_of_step(seed: int) -> list[list[int]]:
    """Return the tokens of each problem's completions; problems differ as well as completions."""
    draws = random.Random(seed)
    groups = []
    for _ in range(PROBLEMS):
        typical = draws.lognormvariate(math.log(3500), 0.5)
        drawn = (draws.lognormvariate(math.log(typical), 0.5) for _ in range(GROUP_SIZE))
        groups.append([int(min(LIMIT, length)) for length in drawn])
    return groups


def in_lockstep(parts: list[list[int]], tokens: list[int]) -> float:
    """Return the time of ranks that meet in every row, as a multiple of the mean rank's tokens."""
    every = [[SequenceLengths(i // GROUP_SIZE, PROMPT, tokens[i]) for i in part] for part in parts]
    rows = [micro_batches(lengths, 16384) for lengths in every]
    most = max(map(len, rows))
    rows = [split_to(own, most, lengths) for own, lengths in zip(rows, every, strict=True)]
    sizes = [[row.num_tokens for row in own] for own in rows]
    return sum(map(max, zip(*sizes, strict=True))) * len(parts) / sum(map(sum, sizes))


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=None)
    parser.add_argument("--seeds", type=int, default=20)
    options = read_options(parser, seeds=1)
    results = {}
    for world_size in (2, 4, 8, 16):
        found: dict[str, list[float]] = {}
        for seed in range(options.seeds):
            tokens = [length for group in lengths_of_step(seed) for length in group]
            families = [range(first, first + GROUP_SIZE) for first in range(0, len(tokens), GROUP_SIZE)]
            count = PROBLEMS // world_size
            by_problem = [
                [i for family in families[first : first + count] for i in family]
                for first in range(0, PROBLEMS, count)
            ]
            for name, parts in (
                ("by problem", by_problem),
                ("by tokens", balance_shards(families, tokens, world_size)),
            ):
                loads = [sum(tokens[i] for i in part) for part in parts]
                found.setdefault(name, []).append(imbalance(loads))
                found.setdefault(f"{name}, in lockstep", []).append(in_lockstep(parts, tokens))
        results[str(world_size)] = {name: statistics.mean(values) for name, values in found.items()}
        results[str(world_size)]["by tokens, worst"] = max(found["by tokens"])
        print(
            world_size,
            {name: round(value, 3) for name, value in results[str(world_size)].items()},
            flush=True,
        )
    worst = max(result["by tokens, worst"] for result in results.values())
    finish(options.output, {"ranks": results}, worst=worst, goal=GOAL)


if __name__ == "__main__":
    main()
