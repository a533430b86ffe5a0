"""The formulas of the RLT reward (arXiv:2506.08388): r_SS and r_KL; and reductions of tokens to numbers."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

# How the values of a completion's tokens become one, under the names of the released RLT code.
TokenReduction = Literal["mean", "sum", "min", "max", "median", "first_quartile", "last_quartile"]


def student_solution_reward(
    log_probs: Tensor, token_mask: Tensor, min_coef: float = 0.01, reduction: TokenReduction = "mean"
) -> Tensor:
    """Score how likely the student finds the solution after reading the explanation.

    r_SS = mean_t log p_t + min_coef * min_t log p_t          (RLT, arXiv:2506.08388, Eq. 3)

    Args:
        log_probs: Student log-probabilities of the solution tokens, (N, S), nats.
        token_mask: True on solution tokens, False on padding, (N, S).
        min_coef: Weight of the hardest token, alpha in the paper.
        reduction: The reduction in place of the mean; see `reduce_tokens`.

    Returns:
        One reward per completion, (N,), nats, never positive. A mean, so long solutions pay no penalty.

    Raises:
        ValueError: If a row has no solution tokens, since its mean is undefined.
    """
    require_tokens(token_mask, "solution token")
    return reduce_tokens(log_probs, token_mask, reduction) + min_coef * masked_min(log_probs, token_mask)


def student_kl_penalty(
    kl: Tensor, token_mask: Tensor, max_coef: float = 0.01, reduction: TokenReduction = "mean"
) -> Tensor:
    """Measure how far the explanation is from what the student would write, given only the question.

    r_KL = mean_t KL_t + max_coef * max_t KL_t          (RLT, arXiv:2506.08388, Eq. 4)

    Args:
        kl: KL of teacher from student at each explanation token, (N, K), nats.
        token_mask: True on explanation tokens, False on padding, (N, K).
        max_coef: Weight of the least natural token, alpha in the paper.
        reduction: The reduction in place of the mean; see `reduce_tokens`.

    Returns:
        One penalty per completion, (N,), nats. 0 for a row without tokens: an empty explanation has no KL,
        and it is the format term that punishes it.
    """
    kl, token_mask = with_zero_for_empty_rows(kl, token_mask)
    return reduce_tokens(kl, token_mask, reduction) + max_coef * masked_max(kl, token_mask)


def require_option(name: str, value: object, holds: bool, expected: str) -> None:
    """Raise a ValueError that names an option of a reward unless what must hold does."""
    if not holds:
        raise ValueError(f"reward.{name} must be {expected}. It is {value!r}.")


def require_reduction(name: str, value: str) -> None:
    """Check that an option names a reduction."""
    known = get_args(TokenReduction)
    require_option(name, value, value in known, f"one of {', '.join(known)}")


def mean_of_tokens(values: Tensor, token_mask: Tensor) -> Tensor:
    """Return the mean of each row's tokens, (N,), in the unit of the values; every row must have some.

    Args:
        values: (N, T). Padding may hold anything, NaN and inf included.
        token_mask: True where a token counts, (N, T).
    """
    return values.masked_fill(~token_mask, 0.0).sum(dim=1) / token_mask.sum(dim=1)


def reduce_tokens(values: Tensor, token_mask: Tensor, reduction: TokenReduction) -> Tensor:
    """Return one number for each row's tokens, (N,), (N, T) -> (N,); every row must have some.

    Quartiles are interpolated; of an even number of tokens the median is the lower of the two in the middle,
    as in the released RLT code.
    """
    if reduction == "mean":
        return mean_of_tokens(values, token_mask)
    if reduction == "sum":
        return values.masked_fill(~token_mask, 0.0).sum(dim=1)
    if reduction in ("min", "max"):
        return (masked_min if reduction == "min" else masked_max)(values, token_mask)
    only = values.masked_fill(~token_mask, torch.nan)
    if reduction == "median":
        return only.nanmedian(dim=1).values
    return only.nanquantile(0.25 if reduction == "first_quartile" else 0.75, dim=1)


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
    empty_rows = [row for row, has_tokens in enumerate(token_mask.any(dim=1).tolist()) if not has_tokens]
    if empty_rows:
        raise ValueError(
            f"Every row needs at least one {what}, but row(s) {empty_rows} of the batch have none. "
            "Drop these examples before they are scored."
        )
