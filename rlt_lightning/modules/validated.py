"""Means over a whole validation, of batches of any size on any rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ValidatedBatch:
    """The figures of one held-out batch.

    Example:
        `ValidatedBatch({"policy/val_loss": 1.25}, count=730, largest={})`, a mean over 730 tokens.
    """

    means: dict[str, float]
    # The number of rows or tokens that the means are taken over.
    count: int
    largest: dict[str, float]


class Validation:
    """Collects the figures of held-out batches on this rank until the end of the validation."""

    def __init__(self) -> None:
        self.batches: list[ValidatedBatch] = []

    def add(self, means: dict[str, Any], count: int, largest: dict[str, float]) -> None:
        """Add a batch: means over `count` rows or tokens, and largest values."""
        self.batches.append(ValidatedBatch({name: float(v) for name, v in means.items()}, count, largest))

    def finish(self, world_size: int) -> dict[str, float]:
        """Return the figures over all batches of all ranks, which call this together, and start again."""
        parts: list[Any] = [self.batches]
        if world_size > 1:
            parts = [None] * world_size
            torch.distributed.all_gather_object(parts, self.batches)
        self.batches = []
        return figures_of([batch for part in parts for batch in part])


def figures_of(batches: list[ValidatedBatch]) -> dict[str, float]:
    """Return the weighted means, 0 over no rows or tokens, and the largest values of all batches."""
    figures = {}
    for name in dict.fromkeys(name for batch in batches for name in batch.means):
        having = [batch for batch in batches if name in batch.means]
        total = sum(batch.count for batch in having)
        figures[name] = sum(batch.means[name] * batch.count for batch in having) / max(1, total)
    for batch in batches:
        for name, value in batch.largest.items():
            figures[name] = max(value, figures.get(name, value))
    return figures
