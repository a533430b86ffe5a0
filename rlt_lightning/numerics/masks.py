"""Means and bounds of rows of unlike length, padded to (N, T)."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_mean(values: Tensor, token_mask: Tensor) -> Tensor:
    """Return the mean of each row's tokens.

    Args:
        values: (N, T). Padding may hold anything, NaN and inf included.
        token_mask: True where a token counts, (N, T).

    Returns:
        (N,), in the unit of `values`.

    Raises:
        ValueError: If a row has no tokens, since its mean is undefined.
    """
    require_tokens(token_mask, "token")
    return values.masked_fill(~token_mask, 0.0).sum(dim=1) / token_mask.sum(dim=1)


def masked_min(values: Tensor, token_mask: Tensor) -> Tensor:
    """Return the smallest of each row's tokens, (N,); inf for a row without tokens."""
    return values.masked_fill(~token_mask, torch.inf).amin(dim=1)


def masked_max(values: Tensor, token_mask: Tensor) -> Tensor:
    """Return the largest of each row's tokens, (N,); -inf for a row without tokens."""
    return values.masked_fill(~token_mask, -torch.inf).amax(dim=1)


def with_zero_for_empty_rows(values: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Give every row without tokens a single 0, as a new first column, (N, K) -> (N, K + 1)."""
    empty = ~token_mask.any(dim=1, keepdim=True)  # (N, 1)
    values = values.masked_fill(~token_mask, 0.0)
    return torch.cat([values.new_zeros(empty.shape), values], dim=1), torch.cat([empty, token_mask], dim=1)


def require_tokens(token_mask: Tensor, what: str) -> None:
    """Raise a ValueError that names the rows without any token."""
    empty_rows = (~token_mask.any(dim=1)).nonzero().flatten().tolist()
    if empty_rows:
        raise ValueError(
            f"Every row needs at least one {what}, but row(s) {empty_rows} of the batch have none. "
            "Drop these examples before they are scored."
        )
