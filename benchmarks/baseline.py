"""How many more tokens the student reads with `reward.baseline: empty`.

    .venv/bin/python benchmarks/baseline.py

A step like the released recipe's (balance.py), with prompts of 800 tokens and solutions of 400. The real
scorer packs and counts the tokens; the student computes nothing. Four cases: all completions at once, in
chunks as completions end, without shared prompts, and with one explanation of each problem, as in
`rlt predict --config recipe_7b/rank`.
"""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import Any

import torch
from balance import GROUP_SIZE, PROMPT, lengths_of_step
from side_by_side import CPU, benchmark_parser, finish, read_options

from rlt_lightning.modules.frozen import Model
from rlt_lightning.modules.phases import PhaseStats
from rlt_lightning.modules.reader import Reader
from rlt_lightning.numerics.packing import Layout, micro_batches
from rlt_lightning.rewards import RLTReward
from rlt_lightning.rewards.students import Students
from rlt_lightning.rollouts.step import StepBatch
from rlt_lightning.types import Completion, ModelView, Problem, Rollout, Rollouts

SOLUTION, SUFFIX, ROW = 400, 12, 16384  # tokens
GOAL = 1.02


def nothing(function: Any, packed: Any, *arguments: Any) -> Any:
    """Stand for a model: states and log-probs of the scored tokens."""
    zeros = torch.zeros(len(packed.targets))
    return zeros.unsqueeze(1), zeros


def rollout_of(problem: Problem, length: int) -> Rollout:
    """Return an explanation of so many tokens, the separator at its end included."""
    completion = Completion([1] * (length + 1), [0.0] * (length + 1), "stop")
    view = ModelView(problem, completion, completion.token_ids[:length], length - 1, length - 1)
    return Rollout(problem, completion, "text", True, (view,))


def step_of(lengths: list[list[int]]) -> list[Rollout]:
    """Return a step's rollouts, group after group."""
    problem = ([1] * PROMPT, [], [1] * PROMPT, [1] * SUFFIX, [1] * SOLUTION)
    problems = [Problem(row, "", "", *problem) for row in range(len(lengths))]
    return [rollout_of(problems[i], length) for i, group in enumerate(lengths) for length in group]


def split_into_chunks(rows: list[Rollout]) -> list[list[Rollout]]:
    """Return the rows in the chunks in which they end, if all are sampled at the same speed."""
    chunks: list[list[Rollout]] = [[]]
    for row in sorted(rows, key=lambda row: len(row.completion.token_ids)):
        if sum(len(r.completion.token_ids) for r in chunks[-1]) >= ROW:
            chunks.append([])
        chunks[-1].append(row)
    return chunks


def tokens_of(chunks: list[list[Rollout]], layout: Layout, baseline: Any) -> int:
    """Return the tokens that the student computes for a step that is read in these chunks."""
    stats = PhaseStats()
    # The separator and the closing tag, as a format makes of an empty trace.
    empty: Any = SimpleNamespace(
        completion_from_trace=lambda problem, trace: Completion([1, 1], None, "stop"),
        build_rollout=lambda problem, completion: Rollout(
            problem, completion, "", True, (ModelView(problem, completion, [1], 0, 0),)
        ),
    )

    def plan(lengths: Any, all_ranks: bool) -> Any:
        return [(row, 1.0) for row in micro_batches(lengths, ROW, layout)]

    students = Students.of("student", None).with_formats([empty])
    reward = RLTReward(baseline=baseline)
    reader = Reader({"student": Model(nothing)}, plan, CPU)
    step = StepBatch.of_rollouts(Rollouts([row for rows in chunks for row in rows], 1, 0, 0.7))
    first = 0
    for rows in chunks:
        places = range(first, first + len(rows))
        reader.read(step, places, lambda rollout: reward.reads(rollout, students), stats)
        first += len(rows)
    return stats.tokens


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=None)
    parser.add_argument("--seeds", type=int, default=5)
    options = read_options(parser, seeds=1)
    ratios: dict[str, list[float]] = {}
    for seed in range(options.seeds):
        rows = step_of(lengths_of_step(seed))
        ways: dict[str, tuple[list[list[Rollout]], Layout]] = {
            "at once": ([rows], "auto"),
            "in chunks": (split_into_chunks(rows), "auto"),
            "without shared prompts": ([rows], "packed"),
            "one explanation of a problem": ([rows[::GROUP_SIZE]], "auto"),
        }
        for name, way in ways.items():
            with_it, without = tokens_of(*way, "empty"), tokens_of(*way, "none")
            ratios.setdefault(name, []).append(with_it / without)
    means = {name: statistics.mean(values) for name, values in ratios.items()}
    for name, mean in means.items():
        print(f"{name}: {mean:.4f} times the tokens")
    sizes = {"prompt": PROMPT, "solution": SOLUTION, "suffix": SUFFIX, "group_size": GROUP_SIZE}
    finish(
        options.output,
        sizes | {"ratios": means},
        ratio=means["at once"],
        chunks=means["in chunks"],
        goal=GOAL,
    )


if __name__ == "__main__":
    main()
