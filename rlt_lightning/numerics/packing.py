"""Several sequences in one row of tokens: no padding is computed, and only scored tokens reach the head."""

from dataclasses import dataclass

import torch
from torch import Tensor


def pack_by_tokens(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Divide sequences into bins of at most `max_tokens`, longest first, each into the first bin with room.

    Args:
        lengths: Tokens of each sequence.
        max_tokens: Room in a bin, tokens. A longer sequence gets a bin of its own.

    Returns:
        The bins, as indices into `lengths`, each index once. Equal lengths always give equal bins.

    Raises:
        ValueError: If `max_tokens` is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, but it is {max_tokens}.")
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


@dataclass(frozen=True)
class PackedSequences:
    """One row of L tokens that holds several sequences, and which M of its tokens are to be scored.

    Call the model with `input_ids`, `position_ids`, `use_cache=False` and no attention mask: positions that
    start again are how transformers sees where a sequence ends. With a cache, or a mask of ones, sequences
    would silently attend to each other. The hidden states that predict the scored tokens are `hidden[0,
    packed.predictors]`.
    """

    input_ids: Tensor  # (1, L)
    position_ids: Tensor  # (1, L), from 0 in each sequence
    scored: Tensor  # (M,), places of the scored tokens in the row
    sequence_of_scored: Tensor  # (M,), the sequence that each belongs to

    @property
    def targets(self) -> Tensor:
        """The scored tokens, (M,)."""
        return self.input_ids[0, self.scored]

    @property
    def predictors(self) -> Tensor:
        """Places of the hidden states that predict the scored tokens, (M,): each the one before."""
        return self.scored - 1

    @classmethod
    def from_lists(
        cls,
        sequences: list[list[int]],
        score_masks: list[list[bool]],
        device: torch.device | str | None = None,
    ) -> "PackedSequences":
        """Pack sequences in the order given.

        Args:
            sequences: Token ids, at least one each.
            score_masks: True where a token is scored, as long as its sequence.
            device: Where the tensors go.

        Raises:
            ValueError: If a sequence is empty, a mask has another length, or a first token is to be scored,
                which no token precedes.
        """
        for row, (sequence, score_mask) in enumerate(zip(sequences, score_masks, strict=True)):
            check_sequence(row, sequence, score_mask)
        input_ids = [token for sequence in sequences for token in sequence]
        position_ids = [place for sequence in sequences for place in range(len(sequence))]
        is_scored = torch.tensor([scored for mask in score_masks for scored in mask], dtype=torch.bool)
        sequence_of_token = torch.repeat_interleave(
            torch.arange(len(sequences)),
            torch.tensor([len(sequence) for sequence in sequences], dtype=torch.long),
        )
        return cls(
            input_ids=torch.tensor([input_ids], dtype=torch.long, device=device),
            position_ids=torch.tensor([position_ids], dtype=torch.long, device=device),
            scored=is_scored.nonzero().flatten().to(device),
            sequence_of_scored=sequence_of_token[is_scored].to(device),
        )


def to_padded(values: Tensor, num_tokens_per_row: list[int]) -> tuple[Tensor, Tensor]:
    """Lay the scored tokens of a packed row out as one row per sequence, padded at the end with 0.

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
    num_tokens = torch.tensor(num_tokens_per_row, dtype=torch.long, device=values.device)  # (N,)
    places = torch.arange(max(num_tokens_per_row, default=0), device=values.device)  # (T,)
    token_mask = places < num_tokens.unsqueeze(1)  # (N, T)
    return values.new_zeros(token_mask.shape).masked_scatter(token_mask, values), token_mask


def from_padded(values: Tensor, token_mask: Tensor) -> Tensor:
    """Undo `to_padded`: drop the padding, (N, T) -> (M,)."""
    return values[token_mask]


def check_sequence(row: int, sequence: list[int], score_mask: list[bool]) -> None:
    """Raise a ValueError unless the sequence can be packed and scored as its mask says."""
    if not sequence or len(sequence) != len(score_mask):
        raise ValueError(
            f"Every sequence needs tokens and a score mask of its length, but sequence {row} has "
            f"{len(sequence)} tokens and {len(score_mask)} mask values."
        )
    if score_mask[0]:
        raise ValueError(
            f"A sequence's first token cannot be scored, none precedes it, but sequence {row} asks for it. "
            "Put a prompt or a beginning-of-sequence token before it."
        )
