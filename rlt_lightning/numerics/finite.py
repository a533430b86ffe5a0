"""Checks that no number that reaches the weights is NaN or infinite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlt_lightning.numerics.packing import to_padded

DIVERGED = (
    "Look at these rows in the data; if they are sound, the model has diverged: resume from an earlier "
    "checkpoint in fp32, or start a new run from its weights (rlt export) with a lower learning rate."
)


class NonFiniteError(ValueError):
    """A number that would reach the weights is NaN or infinite."""


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
