"""How much of scoring is hidden behind sampling: a simulation with the released recipe's lengths, no model.

    .venv/bin/python benchmarks/overlap.py [--output runs/overlap.json]

One step of 16 problems with 64 completions each, lognormal lengths, at most 16k tokens. All completions are
sampled side by side at the same rate, so one of L tokens ends when L tokens of every completion could be
sampled; sampling takes 210 s, scoring and reference 106 s on 4 processes if done at the end (calculated by
hand). Chunks come as in rollouts/sampler.py: when enough tokens have arrived, all of them. It prints the
fraction of scoring that is left when the last completion has arrived,

* if single completions are delivered, or only whole groups;
* for chunks of 1, 2, 4 and 8 forwards of each process.
"""

from __future__ import annotations

import statistics

from balance import lengths_of_step
from side_by_side import benchmark_parser, finish, read_options

SAMPLING_S, SCORING_S = 210.0, 106.0
PROCESSES, MICRO_BATCH = 4, 32768


def exposed_frac(groups: list[list[int]], forwards: int, whole_groups: bool) -> float:
    """Return the seconds of scoring after the last completion, as a fraction of all seconds of scoring."""
    longest, total = max(map(max, groups)), sum(map(sum, groups))
    arrivals = []
    for group in groups:
        ends = [max(group)] * len(group) if whole_groups else group
        arrivals += [(end / longest * SAMPLING_S, length) for end, length in zip(ends, group, strict=True)]
    arrivals.sort()
    now, read, place = 0.0, 0, 0
    while read < total:
        waiting = 0
        while place < len(arrivals):
            at, length = arrivals[place]
            if at > now and waiting >= forwards * PROCESSES * MICRO_BATCH:
                break
            now, waiting, place = max(now, at), waiting + length, place + 1
        now += waiting / total * SCORING_S
        read += waiting
    return (now - SAMPLING_S) / SCORING_S


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=None)
    parser.add_argument("--steps", type=int, default=20)
    options = read_options(parser, steps=1)
    steps = [lengths_of_step(seed) for seed in range(options.steps)]
    results = {}
    for handed, whole_groups in (("completions", False), ("groups", True)):
        for forwards in (1, 2, 4, 8):
            values = [exposed_frac(step, forwards, whole_groups) for step in steps]
            exposed = results[f"{handed}, chunks of {forwards}"] = statistics.mean(values)
            print(f"{handed}, chunks of {forwards} forwards: {exposed:.2f} of scoring is exposed")
    single, group = results["completions, chunks of 1"], results["groups, chunks of 1"]
    finish(options.output, {"exposed": results}, hidden=1 - single, by_groups=1 - group)


if __name__ == "__main__":
    main()
