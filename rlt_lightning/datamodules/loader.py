"""Serve the batches of one rank: shuffled and exactly resumable in training, otherwise in order.

    StepLoader       batches of `fit`
    OrderedLoader    batches of `validate` and `test`
    DealtLoader      batches of `predict`

An order depends only on seed and epoch. So every process computes the same one, and a resumed run needs only
its epoch and the number of batches served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, Generic, TypeVar

import numpy as np
from typing_extensions import override

from rlt_lightning.datamodules.token_cache import StoredItems
from rlt_lightning.types import InputError

Item = TypeVar("Item")
Batch = TypeVar("Batch")


class StepLoader(Generic[Item, Batch]):
    """Serve one batch per optimizer step, in the order of each epoch; a checkpoint holds the position.

    The orders of all epochs follow each other without end, each cut to its full batches:

        order of epoch 0 │ order of epoch 1 │ ...
        ^ position: where the next batch begins; `take_more` moves it too

    An order depends only on seed and epoch, and the position only on what was served. Neither depends on the
    rank, so a run resumes exactly where it stopped. A batch lies within one epoch: if `take_more` leaves less
    than a batch of an epoch, that is passed over. `epoch` and `next_batch` count only the batches: an
    epoch of the run is always `len` batches.

    Args:
        items: All items, the same on every rank.
        batch_size: Items per optimizer step, over all ranks.
        collate: Makes a batch of this rank's items.
        seed: Seed of the order.
        rank: Rank of this process.
        world_size: Number of processes.

    Raises:
        InputError: If the ranks cannot share a batch evenly, or there are fewer items than in one batch.
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
        self.position = 0
        self.before = (0, 0, 0)  # epoch, next_batch and position before the batch that was served last
        self.served: set[int] = set()  # numbers of the items of this step, over all ranks
        self.epoch_order: tuple[int, list[int]] = (-1, [])  # an epoch and its order, slow to make
        self.in_use = False  # whether this process has served a batch
        # Optimizer step that trains on the first batch; `begin_at` sets it.
        self.first_step: int | None = None

    def __len__(self) -> int:
        return len(self.items) // self.batch_size

    def __iter__(self) -> Iterator[Batch]:
        for batch in range(self.next_batch, len(self)):
            self.before = (self.epoch, self.next_batch, self.position)
            start = self._next_start()
            # Advance before yielding: this step's checkpoint must point to the next batch, and after the last
            # batch this code is not reached again.
            last = batch + 1 == len(self)
            self.epoch, self.next_batch = (self.epoch + 1, 0) if last else (self.epoch, batch + 1)
            self.position = start + self.batch_size
            self.served = {self._number_at(index) for index in range(start, self.position)}
            self.in_use = True
            yield self._build_batch(start)

    def peek(self) -> Batch:
        """Return the next batch without advancing."""
        return self._build_batch(self._next_start())

    def take_more(self, number: int) -> list[Item]:
        """Return the next items of the order that this step has not had, the same on every rank, and advance.

        They are fewer if as many items as an epoch has hold no more.
        """
        numbers: list[int] = []
        end = self.position + self._epoch_size
        while len(numbers) < number and self.position < end:
            item = self._number_at(self.position)
            self.position += 1
            if item not in self.served:
                self.served.add(item)
                numbers.append(item)
        return [self.items[i] for i in numbers]

    def rewind(self) -> None:
        """Go back by one batch, to serve it again: callbacks/checkpoint.py saves when its engine failed."""
        self.epoch, self.next_batch, self.position = self.before

    def list_epoch(self, epoch: int) -> list[int]:
        """Return the numbers of all items in an epoch's order, the same in every process."""
        order = list(range(len(self.items)))
        Random(f"order {self.seed} {epoch}").shuffle(order)
        return order

    def _build_batch(self, start: int) -> Batch:
        """Make this rank's part of the batch that begins at a position."""
        size = self.batch_size // self.world_size
        start += self.rank * size
        return self.collate([self.items[self._number_at(i)] for i in range(start, start + size)])

    @property
    def _epoch_size(self) -> int:
        return len(self) * self.batch_size

    def _next_start(self) -> int:
        """Return where the next batch begins: in the next epoch if too few items are left of this one."""
        left = self._epoch_size - self.position % self._epoch_size
        return self.position + (left if left < self.batch_size else 0)

    def _number_at(self, position: int) -> int:
        """Return the number of the item at a position."""
        epoch, index = divmod(position, self._epoch_size)
        if self.epoch_order[0] != epoch:
            self.epoch_order = (epoch, self.list_epoch(epoch))
        return self.epoch_order[1][index]

    def begin_at(self, step: int) -> None:
        """Learn which optimizer step the next batch is for; after a resume it must be the checkpoint's.

        Raises:
            InputError: If the position is that of another step: rows would come twice, or be left out.
        """
        num_batches = self.epoch * len(self) + self.next_batch
        if self.first_step is None:
            self.first_step = step - num_batches
        trained = step - self.first_step
        if num_batches != trained or self.position < trained * self.batch_size:
            raise InputError(
                f"After step {step} the data must go on with batch {trained}, at item "
                f"{trained * self.batch_size} or later, but the checkpoint's position is batch "
                f"{num_batches}, item {self.position}: rows would come twice, or be left out. Resume from "
                "another checkpoint."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the data and settings that it is valid for."""
        state = {"epoch": self.epoch, "next_batch": self.next_batch, "position": self.position}
        state |= {} if self.first_step is None else {"first_step": self.first_step}
        return {**state, **self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position of a state.

        Raises:
            InputError: If the number of rows, the batch size or the seed have changed since.
        """
        for name, value in self._fingerprint().items():
            if state[name] != value:
                raise InputError(
                    f"A resumed run must have the data of its checkpoint, but {name} was {state[name]} and "
                    f"is {value}. Restore it, or start a new run from the exported model."
                )
        self.epoch, self.next_batch = state["epoch"], state["next_batch"]
        self.first_step = state.get("first_step")
        self.position = state["position"]

    def _fingerprint(self) -> dict[str, int]:
        return {"num_rows": len(self.items), "prompts_per_step": self.batch_size, "seed": self.seed}


class OrderedLoader(Generic[Item, Batch]):
    """Serve all items once, in order, for validation. The last batch may be smaller.

    Each rank gets its part of every batch; the first ranks get the larger parts. A rank whose part of the
    last batch is empty has one batch less.

    Args:
        items: All items, the same on every rank.
        batch_size: Items per batch, over all ranks.
        collate: Makes a batch of this rank's items.
        rank: Rank of this process.
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
        self.items, self.collate = items, collate
        every = range(len(items))
        self.shards = self.deal([every[i : i + batch_size] for i in every[::batch_size]], rank, world_size)

    def deal(self, batches: list[range], rank: int, world_size: int) -> list[range]:
        """Return the rank's item numbers of each batch."""
        return [shard for batch in batches if (shard := find_shard(batch, rank, world_size))]

    def __len__(self) -> int:
        return len(self.shards)

    def __iter__(self) -> Iterator[Batch]:
        for shard in self.shards:
            yield self.collate([self.items[number] for number in shard])


class DealtLoader(OrderedLoader[Item, Batch]):
    """Serve whole batches to ranks in turn, for prediction: so figures equal those of one rank exactly.

        rank 0    batch 0    batch 2    batch 4
        rank 1    batch 1    batch 3    spare: the first item again

    All ranks get equally many, since Lightning and models in shards need that. See `OrderedLoader`.
    """

    @override
    def deal(self, batches: list[range], rank: int, world_size: int) -> list[range]:
        self.has_spare = rank >= len(batches) % world_size > 0
        return batches[rank::world_size]

    @override
    def __len__(self) -> int:
        return len(self.shards) + self.has_spare

    @override
    def __iter__(self) -> Iterator[Batch]:
        yield from super().__iter__()
        if self.has_spare:
            batch: Any = self.collate([self.items[0]])
            batch.spare = True
            yield batch


def find_shard(numbers: range, rank: int, world_size: int) -> range:
    """Return the rank's part of the numbers. Parts are contiguous, and their sizes differ by at most one."""
    size, larger = divmod(len(numbers), world_size)
    start = rank * size + min(rank, larger)
    return numbers[start : start + size + (rank < larger)]


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
    return items.select(~held_out), items.select(held_out)
