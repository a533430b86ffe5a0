"""What the seed decides: which rows are held out, and which items an epoch has in which order.

An order is a function of only seed and epoch. So every process finds the same one, and a resumed run needs
only its epoch and the number of batches served.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rlt_lightning.datamodules.bad_rows import row_list
from rlt_lightning.datamodules.tokenised import StoredItems
from rlt_lightning.types import InputError


class EpochOrder(ABC):
    """The items of an epoch, in order.

    Attributes:
        num_items: Items of an epoch.
        name: What the order depends on beside the seed; a resumed run must have the same.
    """

    num_items: int
    name: str

    @abstractmethod
    def of_epoch(self, epoch: int) -> list[int]:
        """Return the numbers of an epoch's items."""


class Shuffled(EpochOrder):
    """All items, in a new order every epoch."""

    name = "shuffled"

    def __init__(self, num_items: int, seed: int) -> None:
        self.num_items = num_items
        self.seed = seed

    @override
    def of_epoch(self, epoch: int) -> list[int]:
        return shuffled(range(self.num_items), f"order {self.seed} {epoch}")


class Weighted(EpochOrder):
    """Of each source its share of an epoch; an epoch ends where the first source is used up.

    Every source is read in rounds: all its items come, in a new order every round, before one comes again.
    The next epoch continues each source where this one has left it.

    Args:
        sources: Number of each item's source, from 0.
        weights: Weight of each source; its share is this part of their sum.
        seed: Seed of the order.

    Raises:
        InputError: If a source gets no item.
    """

    def __init__(self, sources: NDArray[Any], weights: Sequence[float], seed: int) -> None:
        self.seed = seed
        self.places = [np.flatnonzero(sources == number).tolist() for number in range(len(weights))]
        sizes = [len(places) for places in self.places]
        if not all(sizes):
            raise InputError(
                f"Every source with a weight must have a row to train on, but source {sizes.index(0) + 1} of "
                f"{len(sizes)} has none: all are unusable, filtered or held out. Drop it, or keep more rows."
            )
        total = sum(weights)
        most = (size * total / weight for size, weight in zip(sizes, weights, strict=True))
        longest = int(min(most) + 1e-9)  # for rounding
        exact = [longest * weight / total for weight in weights]
        self.counts = [int(count) for count in exact]
        # The largest remainders get what rounding down has left.
        by_remainder = sorted(range(len(exact)), key=lambda number: self.counts[number] - exact[number])
        for number in by_remainder[: longest - sum(self.counts)]:
            self.counts[number] += 1
        self.num_items = sum(self.counts)
        self.name = ", ".join(f"weight {w:g} of {n} items" for w, n in zip(weights, sizes, strict=True))
        for number, count in enumerate(self.counts):
            if not count:
                raise InputError(
                    f"Every source must give at least one item of an epoch, but with {self.name} an epoch "
                    f"has {self.num_items} items, of which source {number + 1} gives none. Raise its weight, "
                    "or drop it."
                )

    @override
    def of_epoch(self, epoch: int) -> list[int]:
        chosen: list[int] = []
        for number, (places, count) in enumerate(zip(self.places, self.counts, strict=True)):
            first, last = epoch * count, (epoch + 1) * count
            begun, ended = first // len(places), -(-last // len(places))
            rounds = [shuffled(places, f"source {number} {self.seed} {r}") for r in range(begun, ended)]
            stream = [place for one in rounds for place in one]
            chosen += stream[first - begun * len(places) :][:count]
        return shuffled(chosen, f"order {self.seed} {epoch}")


@dataclass(frozen=True)
class Difficulty:
    """An order by difficulty: rows with a higher number are easier.

    Args:
        column: The number: the share of right answers, or a reward, as `rlt predict` has written it.
        first: Whether an epoch begins with the easiest rows or with the hardest.
    """

    column: Literal["pass_rate", "reward"] = "pass_rate"
    first: Literal["easy", "hard"] = "easy"


class ByDifficulty(EpochOrder):
    """All items, sorted by a number of their rows; equal ones in a new order every epoch.

    Args:
        items: The items.
        difficulty: The number, and which end comes first.
        seed: Seed of the order of equal ones.

    Raises:
        InputError: If a row lacks the number.
    """

    def __init__(self, items: StoredItems, difficulty: Difficulty, seed: int) -> None:
        self.shuffled = Shuffled(len(items), seed)
        self.num_items = len(items)
        self.name = f"{difficulty.first} first, by {difficulty.column}"
        values = items.numbers(difficulty.column)
        if without := items.rows[np.isnan(values)].tolist():
            raise InputError(
                f"data.order needs a number {difficulty.column} in every row, but {len(without)} of "
                f"{len(items)} have none ({row_list(without)}; a cell of a CSV file is a text). Score the "
                "rows first, or drop data.order."
            )
        self.values = (values if difficulty.first == "hard" else -values).tolist()

    @override
    def of_epoch(self, epoch: int) -> list[int]:
        return sorted(self.shuffled.of_epoch(epoch), key=self.values.__getitem__)


def shuffled(numbers: Sequence[int], seed: str) -> list[int]:
    """Return numbers in an order that the seed decides; a text gives the same one in every process."""
    order = list(numbers)
    Random(seed).shuffle(order)
    return order


def hold_out(items: StoredItems, num_rows: int, seed: int) -> tuple[StoredItems, StoredItems]:
    """Split items by their rows into training and held-out ones, both in the source's order.

    Raises:
        InputError: If no row is left to train on.
    """
    rows = list(dict.fromkeys(items.rows.tolist()))
    if num_rows >= len(rows):
        raise InputError(
            f"data.val_rows must be below the number of usable rows, but is {num_rows} of {len(rows)}. Lower "
            "it, or set data.val_source."
        )
    held_out = np.isin(items.rows, Random(f"held out {seed}").sample(rows, num_rows))
    return items.where(~held_out), items.where(held_out)
