"""The formulas of the RLT reward (arXiv:2506.08388): r_SS and r_KL; and reductions of tokens to numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from rlt_lightning.numerics.packing import to_padded

# How the values of a completion's tokens become one, under the names of the released RLT code.
TokenReduction = Literal["mean", "sum", "min", "max", "median", "first_quartile", "last_quartile"]


DIVERGED = (
    "Look at these rows in the data; if they are sound, the model has diverged: resume from an earlier "
    "checkpoint in fp32, or start a new run from its weights (rlt export) with a lower learning rate."
)


class NonFiniteError(ValueError):
    """A number that would reach the weights is NaN or infinite."""


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


def choose_remedy(source: object) -> str:
    """Return the remedy for an object that computes NaN or an infinity from finite log-probs."""
    kind = type(source)
    if kind.__module__.startswith("rlt_lightning."):
        return DIVERGED
    return f"The log-probs are finite: correct {kind.__name__}, which may take the log of 0, or divide by 0."


def require_finite(values: Tensor, term: str, rows: Sequence[int], remedy: str = DIVERGED) -> None:
    """Stop before NaN or an infinity reaches the weights.

    Args:
        values: One row per example, (N,) or (N, T), padding already masked.
        term: A name of the values, for the message, e.g. "student log-prob".
        rows: The examples' row numbers in the data, N of them.
        remedy: The end of the message.

    Raises:
        NonFiniteError: If a value is NaN or infinite; it names the term and the rows.
    """
    values = values.detach().unsqueeze(-1).flatten(1)  # (N, T)
    bad = ~values.isfinite()  # (N, T)
    if not bad.any():
        return
    bad_rows = sorted({row for row, is_bad in zip(rows, bad.any(dim=1).tolist(), strict=True) if is_bad})
    found = " and ".join(sorted({str(value) for value in values[bad].tolist()}))
    raise NonFiniteError(
        f"Every {term} must be finite, but row(s) {', '.join(map(str, bad_rows))} have {found}. {remedy}"
    )


class FiniteChecks:
    """Checks of a device's values, made together when everything has been computed.

    The host waits once for all of them, and prepares the next rows while the device computes.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, list[int], tuple[str, str], list[int]]] = []

    def add(
        self,
        values: Tensor,
        num_tokens_per_row: list[int],
        term: str,
        rows: list[int],
        remedy: str = DIVERGED,
    ) -> None:
        """Keep values to be checked, (M,), one row after another; see `require_finite`."""
        self.kept.append((values.detach(), num_tokens_per_row, (term, remedy), rows))

    def find_bad(self) -> Tensor:
        """Return whether a value is NaN or infinite, a bool on the device; the host does not wait."""
        if not self.kept:
            return torch.tensor(False, device="cpu")
        return ~torch.stack([values.isfinite().all() for values, *_ in self.kept]).all()

    def require(self) -> None:
        """Check everything that was added.

        Raises:
            NonFiniteError: If a value is NaN or infinite; it names the first such term and all its rows.
        """
        is_bad, kept, self.kept = self.find_bad(), self.kept, []
        if not is_bad:
            return
        for what in dict.fromkeys(what for *_, what, _ in kept):
            parts = [part for part in kept if part[2] == what]
            values = torch.cat([values for values, *_ in parts])
            counts = [count for _, counts, *_ in parts for count in counts]
            rows = [row for *_, numbers in parts for row in numbers]
            term, remedy = what
            require_finite(to_padded(values, counts)[0], term, rows, remedy)


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
