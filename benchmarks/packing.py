"""How long it takes to build a packed row on the CPU, against a loop over tokens.

    .venv/bin/python benchmarks/packing.py [--rounds 5] [--completions 16] [--tokens 1900]

One prompt of 350 tokens and its completions: about 31k tokens in a row. A GPU waits while a row is built.
"""

from __future__ import annotations

import torch
from side_by_side import alternate, benchmark_parser, finish, measure, read_options

from rlt_lightning.numerics.packing import PackedSequences, ScoredSequence

GOAL = 5  # times as fast as the loop


def token_by_token(sequences: list[ScoredSequence]) -> list[torch.Tensor]:
    prefix = sequences[0].prefix
    tokens, positions = [], []
    predictors, targets, owners = [], [], []
    for position, token in enumerate(prefix):
        tokens.append(token)
        positions.append(position)
    for number, sequence in enumerate(sequences):
        places = list(range(len(prefix)))
        for token in sequence.rest:
            positions.append(len(places))
            places.append(len(tokens))
            tokens.append(token)
        for t, is_scored in enumerate(sequence.scored):
            if is_scored:
                predictors.append(places[t - 1])
                targets.append(tokens[places[t]])
                owners.append(number)
    return [torch.tensor(column) for column in (tokens, positions, predictors, targets, owners)]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--prompt", type=int, default=350)
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1900)
    options = read_options(parser, completions=2, tokens=50)
    numbers = torch.Generator().manual_seed(0)
    prompt = torch.randint(50_000, (options.prompt,), generator=numbers).tolist()
    rests = torch.randint(50_000, (options.completions, options.tokens), generator=numbers).tolist()
    scored = [False] * options.prompt + [True] * options.tokens
    sequences = [ScoredSequence(prompt, rest, scored) for rest in rests]
    families = (tuple(range(options.completions)),)
    packed = PackedSequences.from_sequences(sequences, families)
    ours = packed.input_ids[0], packed.position_ids[0], packed.predictors, packed.targets
    for column, expected in zip((*ours, packed.sequence_of_scored), token_by_token(sequences), strict=True):
        assert torch.equal(column, expected)
    results = alternate(
        {
            "loop": lambda: measure(lambda: token_by_token(sequences)),
            "ours": lambda: measure(lambda: PackedSequences.from_sequences(sequences, families)),
        },
        options.rounds,
    )
    times_as_fast = results["loop"]["seconds"] / results["ours"]["seconds"]
    tokens = packed.input_ids.numel()
    finish(options.output, {"sides": results}, times_as_fast=times_as_fast, goal=GOAL, tokens=tokens)


if __name__ == "__main__":
    main()
