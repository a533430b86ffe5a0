"""Batches of one rank: shuffled and exactly resumable for training, in order and complete otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, Generic, TypeVar

from rlt_lightning.types import InputError

Item = TypeVar("Item")
Batch = TypeVar("Batch")


class StepLoader(Generic[Item, Batch]):
    """One batch per optimizer step, in a new order every epoch; a checkpoint holds where it stands.

    The order is a function of seed and epoch alone, and the state of the number of batches taken. Neither
    depends on the rank, so a run goes on exactly where it stopped. What is left of an epoch after its last
    full batch is dropped; the next epoch draws from all rows again.

    Args:
        items: All items, the same on every rank.
        batch_size: Items per optimizer step, over all ranks.
        collate: Makes a batch of this rank's items.
        seed: Of the order.
        rank: Of this process.
        world_size: Number of processes.

    Raises:
        InputError: If the batch cannot be shared out evenly, or there are fewer items than one batch takes.
    """

    def __init__(
        self,
        items: Sequence[Item],
        batch_size: int,
        collate: Callable[[list[Item]], Batch],
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1 or batch_size % world_size:
            raise InputError(
                f"data.prompts_per_step must be a multiple of the {world_size} process(es), but is "
                f"{batch_size}. Change it, or trainer.devices."
            )
        if len(items) < batch_size:
            raise InputError(
                f"The training set must have at least data.prompts_per_step={batch_size} usable rows, but "
                f"has {len(items)}. Add rows, or lower data.prompts_per_step or data.val_rows."
            )
        self.items = items
        self.batch_size = batch_size
        self.collate = collate
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.next_batch = 0
        self.in_use = False  # whether this process has taken a batch

    def __len__(self) -> int:
        return len(self.items) // self.batch_size

    def __iter__(self) -> Iterator[Batch]:
        epoch = self.epoch
        for batch in range(self.next_batch, len(self)):
            # Move on before the batch is used: a checkpoint written after it must not bring it again, and
            # nobody asks for more after the last one.
            last = batch + 1 == len(self)
            self.epoch, self.next_batch = (self.epoch + 1, 0) if last else (self.epoch, batch + 1)
            self.in_use = True
            yield self.batch(epoch, batch)

    def peek(self) -> Batch:
        """Return the batch that comes next, and stay where it is."""
        return self.batch(self.epoch, self.next_batch)

    def rewind(self) -> None:
        """Go back to before the batch that was taken last."""
        taken = self.epoch * len(self) + self.next_batch - 1
        self.epoch, self.next_batch = divmod(taken, len(self))

    def batch(self, epoch: int, number: int) -> Batch:
        """Return this rank's part of a batch."""
        share = self.batch_size // self.world_size
        start = number * self.batch_size + self.rank * share
        return self.collate([self.items[i] for i in self.order(epoch)[start : start + share]])

    def order(self, epoch: int) -> list[int]:
        """Return the order of the items in an epoch."""
        order = list(range(len(self.items)))
        Random(f"order {self.seed} {epoch}").shuffle(order)  # seeded with text: the same in every process
        return order

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, and what it must be made of to go on from there."""
        return {"epoch": self.epoch, "next_batch": self.next_batch, **self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken.

        Raises:
            InputError: If rows, batch size or seed have changed since.
        """
        for name, value in self._fingerprint().items():
            if state[name] != value:
                raise InputError(
                    f"A resumed run must have the data of its checkpoint, but {name} was {state[name]} and "
                    f"is {value}. Restore it, or start a new run from the exported model."
                )
        self.epoch, self.next_batch = state["epoch"], state["next_batch"]

    def _fingerprint(self) -> dict[str, int]:
        return {"num_rows": len(self.items), "prompts_per_step": self.batch_size, "seed": self.seed}


class OrderedLoader(Generic[Item, Batch]):
    """All items once, in order: for validation and prediction. The last batch may be smaller.

    With several ranks each takes its part of every batch, the first ranks the larger ones; a rank that would
    get nothing of the last batch has one batch less.

    Args:
        items: All items, the same on every rank.
        batch_size: Items per batch, over all ranks.
        collate: Makes a batch of this rank's items.
        rank: Of this process.
        world_size: Number of processes.
    """

    def __init__(
        self,
        items: Sequence[Item],
        batch_size: int,
        collate: Callable[[list[Item]], Batch],
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1:
            raise InputError(f"data.val_batch_size must be at least 1, but is {batch_size}. Raise it.")
        self.collate = collate
        batches = (items[start : start + batch_size] for start in range(0, len(items), batch_size))
        shares = (share_of(batch, rank, world_size) for batch in batches)
        self.shares = [share for share in shares if share]

    def __len__(self) -> int:
        return len(self.shares)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.collate, self.shares)


def share_of(items: Sequence[Item], rank: int, world_size: int) -> list[Item]:
    """Return the rank's part of the items: contiguous, sizes differ by one at most."""
    size, larger = divmod(len(items), world_size)
    start = rank * size + min(rank, larger)
    return list(items[start : start + size + (rank < larger)])
