"""Several sequences in one row of tokens: no padding, shared prefixes once, a head for scored tokens only."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlt_lightning.numerics.attention import Segments, SharedPrefix
from rlt_lightning.numerics.transfers import upload

Layout = Literal["auto", "shared_prefix", "packed", "single"]

# What sharing adds for a token after the prefix (a second attention call, and merging the two), as a fraction
# of a token's whole cost. research/speed.md has the figures.
SHARING_COST = 0.02


class ScoredSequence(NamedTuple):
    """A sequence of tokens, and which of them are scored.

    Example:
        `ScoredSequence([5, 7], [9, 2], [False, False, True, True])` scores 9 after 5 7, and 2 after 5 7 9.

    Attributes:
        prefix: Tokens that other sequences of the row may share; may be empty.
        rest: The tokens after the prefix.
        scored: Whether each token of prefix + rest is scored.
    """

    prefix: list[int]
    rest: list[int]
    scored: Sequence[int]


class SequenceLengths(NamedTuple):
    """The lengths of a sequence; sequences of equal `prefix` begin with the same tokens."""

    prefix: Hashable
    num_prefix: int  # tokens
    num_rest: int  # tokens


@dataclass(frozen=True)
class MicroBatch:
    """Indices of sequences that go through the model in one row, in families that share their prefix.

    Example:
        `MicroBatch(((0, 1), (4,)), num_tokens=90)`: 0 and 1 share a prefix, 4 has another.
    """

    families: tuple[tuple[int, ...], ...]
    num_tokens: int

    @property
    def indices(self) -> list[int]:
        """Return all members, family after family, in the order of the row."""
        return [index for family in self.families for index in family]


def sharing_pays(lengths: list[SequenceLengths]) -> bool:
    """Return whether computing a family's prefix once saves more than sharing costs.

    saved = (n - 1) * prefix tokens,  cost = SHARING_COST * continuation tokens
    """
    saved = (len(lengths) - 1) * lengths[0].num_prefix
    return saved > SHARING_COST * sum(length.num_rest for length in lengths)


def micro_batches(
    lengths: list[SequenceLengths], max_tokens: int, layout: Layout = "auto"
) -> list[MicroBatch]:
    """Divide sequences into rows of at most `max_tokens`, longest first, each into the first row with room.

    A family that does not fit into one row is cut, and each piece computes the prefix again.

    Args:
        lengths: The lengths of each sequence.
        max_tokens: Room in a row, tokens. A longer sequence gets a row by itself.
        layout: "shared_prefix": a family computes its prefix once; "packed": never; "auto": where
            `sharing_pays`; "single": one sequence a row.

    Returns:
        The rows, longest first, with each index once. Equal lengths always give equal rows.

    Raises:
        ValueError: If `max_tokens` is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, but it is {max_tokens}.")
    groups: dict[Hashable, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault(length.prefix, []).append(index)
    families: list[tuple[int, ...]] = []
    for members in groups.values():
        chosen = [lengths[i] for i in members]
        if chosen[0].num_prefix and (
            layout == "shared_prefix" or (layout == "auto" and sharing_pays(chosen))
        ):
            room = max(1, max_tokens - chosen[0].num_prefix)
            bins = first_fit([length.num_rest for length in chosen], room)
            families += [tuple(sorted(members[j] for j in bin)) for bin in bins]
        else:
            families += [(i,) for i in members]
    sizes = [build_row((family,), lengths).num_tokens for family in families]
    bins = first_fit(sizes, 1 if layout == "single" else max_tokens)
    return sort_by_size([build_row(tuple(families[j] for j in bin), lengths) for bin in bins])


def build_row(families: tuple[tuple[int, ...], ...], lengths: list[SequenceLengths]) -> MicroBatch:
    """Return a row of families, each with its prefix once."""
    prefixes = sum(lengths[family[0]].num_prefix for family in families)
    rests = sum(lengths[i].num_rest for family in families for i in family)
    return MicroBatch(families, prefixes + rests)


def first_fit(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Put each length, longest first, into the first bin with room; one that fits no bin gets a new bin."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fitting = (number for number, free in enumerate(room) if free >= lengths[index])
        target = next(fitting, len(bins))
        if target == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[target].append(index)
        room[target] -= lengths[index]
    return bins


def split_to(rows: list[MicroBatch], count: int, lengths: list[SequenceLengths]) -> list[MicroBatch]:
    """Halve the largest rows until there are `count` rows, or none can be halved.

    Ranks must run equally many rows: a rank with fewer rows had better run smaller ones than empty ones.
    """
    rows = list(rows)
    while len(rows) < count:
        divisible = [row for row in rows if len(row.indices) > 1]
        if not divisible:
            break
        row = divisible[0]
        rows.remove(row)
        rows = sort_by_size([*rows, *split_in_two(row, lengths)])
    return rows


def split_in_two(row: MicroBatch, lengths: list[SequenceLengths]) -> list[MicroBatch]:
    """Deal a row's families out to two rows or, if it has only one, the members of that one."""
    if len(row.families) > 1:
        return [build_row(row.families[half::2], lengths) for half in range(2)]
    return [build_row((row.families[0][half::2],), lengths) for half in range(2)]


def sort_by_size(rows: list[MicroBatch]) -> list[MicroBatch]:
    """Sort rows, longest first, so that ranks run rows of like size at a time; ties by the first index."""
    return sorted(rows, key=lambda row: (-row.num_tokens, row.indices))


@dataclass(frozen=True)
class PackedSequences:
    """One row of L tokens that holds several sequences, and the M tokens of them that are to be scored.

    A family's prefix stands once, before the rests of its members, whose positions continue after the prefix.
    A token that is scored in a shared prefix is scored for every member.
    """

    input_ids: Tensor  # (1, L)
    position_ids: Tensor  # (1, L), from 0 in each sequence
    segments: Segments
    predictors: Tensor  # (M,), slots of the hidden states that predict the scored tokens
    targets: Tensor  # (M,), the scored tokens, sequence after sequence

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[ScoredSequence],
        families: tuple[tuple[int, ...], ...] | None = None,
        device: torch.device | str | None = None,
    ) -> PackedSequences:
        """Pack sequences; scored tokens come out in the order of the families' members.

        Args:
            sequences: At least one token each.
            families: Indices of sequences that share their prefix; None: no sequences share one.
            device: The device of the tensors.

        Raises:
            ValueError: If a sequence is empty, a mask has another length, a first token is to be scored,
                although no token precedes it, or members of a family have different prefixes.
        """
        row = RowInProgress()
        for family in families if families is not None else [(i,) for i in range(len(sequences))]:
            row.add(family, sequences)
        columns = row.columns()
        # One copy to the device instead of four.
        together = upload(torch.cat(columns), device)
        tokens, positions, *scored = together.split([len(column) for column in columns])
        segments = Segments(tuple(row.boundaries), tuple(row.shared))
        return cls(tokens.unsqueeze(0), positions.unsqueeze(0), segments, *scored)


@dataclass
class RowInProgress:
    """Collects a `PackedSequences` family by family; no Python code runs per token."""

    tokens: list[int] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=lambda: [0])
    shared: list[SharedPrefix] = field(default_factory=list)
    # Ranges of positions, in the order of the row.
    positions: list[IndexRange] = field(default_factory=list)
    # Ranges of slots in the row that hold each member's tokens, a shared prefix once for each member.
    slots: list[IndexRange] = field(default_factory=list)
    # Whether each of these tokens is scored, one byte each.
    scored: bytearray = field(default_factory=bytearray)

    def add(self, family: tuple[int, ...], sequences: Sequence[ScoredSequence]) -> None:
        """Append a family: its prefix once, then the rest of each member."""
        for i in family:
            check_sequence(i, sequences[i])
        prefix = sequences[family[0]].prefix
        if any(sequences[i].prefix != prefix for i in family):
            raise ValueError(f"Sequences of a family must share their prefix, but {list(family)} do not.")
        prefix_range = IndexRange(len(self.tokens), len(prefix))
        self.tokens += prefix
        self.positions.append(IndexRange(0, len(prefix)))
        split = len(self.tokens)
        is_shared = bool(prefix) and len(family) > 1
        if is_shared:
            self.boundaries.append(split)
        for i in family:
            self.add_rest(sequences[i], prefix_range)
        if is_shared and len(self.tokens) > split:
            self.shared.append(SharedPrefix(prefix_range.first, split, len(self.tokens)))

    def add_rest(self, sequence: ScoredSequence, prefix_range: IndexRange) -> None:
        """Append one member's tokens after the prefix, and note which of its tokens are scored."""
        rest = sequence.rest
        self.positions.append(IndexRange(prefix_range.length, len(rest)))
        self.slots += [prefix_range, IndexRange(len(self.tokens), len(rest))]
        self.scored += bytes(sequence.scored)
        self.tokens += rest
        if len(self.tokens) > self.boundaries[-1]:
            self.boundaries.append(len(self.tokens))

    def columns(self) -> list[Tensor]:
        """Return tokens and positions, (L,), then predictors and targets, (M,), int64."""
        # array() reads a list several times as fast as torch.tensor().
        tokens = torch.frombuffer(array("q", self.tokens), dtype=torch.long)
        slots = expand_ranges(self.slots)
        scored = torch.frombuffer(self.scored, dtype=torch.bool).nonzero().squeeze(1)  # (M,)
        # A first token is never scored, so the token before is one of the same sequence.
        return [tokens, expand_ranges(self.positions), slots[scored - 1], tokens[slots[scored]]]


class IndexRange(NamedTuple):
    """The numbers first, first + 1, …, `length` of them."""

    first: int
    length: int


def expand_ranges(ranges: list[IndexRange]) -> Tensor:
    """Return the numbers of all ranges, one after another."""
    firsts, lengths = torch.tensor(ranges).unbind(1)
    before = lengths.cumsum(0) - lengths
    slots = (firsts - before).repeat_interleave(lengths)
    return slots + torch.arange(len(slots))


def to_padded(values: Tensor, num_tokens_per_row: list[int]) -> tuple[Tensor, Tensor]:
    """Turn the scored tokens of a packed row into one row per sequence, padded at the end with 0.

    Args:
        values: One per scored token, sequence after sequence, (M,).
        num_tokens_per_row: Scored tokens of each sequence, N numbers that sum to M.

    Returns:
        The values, (N, T), with gradient, and their token mask, (N, T).

    Raises:
        ValueError: If the numbers do not sum to M.
    """
    if sum(num_tokens_per_row) != len(values):
        raise ValueError(
            f"num_tokens_per_row must sum to the {len(values)} values that came, but it sums to "
            f"{sum(num_tokens_per_row)}."
        )
    token_mask = mask_tokens(num_tokens_per_row)  # (N, T)
    slots = upload(find_slots(token_mask), values.device)
    padded = values.new_zeros(token_mask.numel()).index_copy(0, slots, values)
    return padded.view(token_mask.shape), upload(token_mask, values.device)


def mask_tokens(num_tokens_per_row: list[int]) -> Tensor:
    """Return the token mask of rows of these lengths, (N, T), in main memory."""
    lengths = torch.tensor(num_tokens_per_row, dtype=torch.long, device="cpu").unsqueeze(1)  # (N, 1)
    return torch.arange(max(num_tokens_per_row, default=0), device="cpu") < lengths


def find_slots(token_mask: Tensor) -> Tensor:
    """Return where tokens stand in padded rows one after another, (M,).

    Where the mask itself indexes, the host waits for a GPU to count, and again in the backward pass.
    """
    return token_mask.flatten().nonzero().squeeze(1)


def check_sequence(row: int, sequence: ScoredSequence) -> None:
    """Raise a ValueError unless the sequence can be packed and scored as its mask says."""
    num_tokens = len(sequence.prefix) + len(sequence.rest)
    if not num_tokens or num_tokens != len(sequence.scored):
        raise ValueError(
            f"Every sequence needs tokens and a score mask of its length, but sequence {row} has "
            f"{num_tokens} tokens and {len(sequence.scored)} mask values."
        )
    if sequence.scored[0]:
        raise ValueError(
            f"A sequence's first token cannot be scored, since no token precedes it, but sequence {row} asks "
            "for it. Put a prompt or a beginning-of-sequence token before it."
        )
