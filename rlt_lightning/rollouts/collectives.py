"""What the ranks of a run do together around an engine, however long one of them takes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from lightning.pytorch import Trainer

from rlt_lightning.engines.base import EngineError
from rlt_lightning.run.ranks import gather_from_ranks, waiting_for_ranks
from rlt_lightning.types import InputError

T = TypeVar("T")


class Collectives:
    """Lets ranks wait for each other in a process group of its own; the strategy's would give up earlier.

    Args:
        deadline_s: How long a rank waits for the others.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        # The process group in which ranks wait, made by the first call of all ranks.
        self.group: Any = None

    def on_rank_zero(
        self, trainer: Trainer, function: Callable[[], T], what: str = "rank 0, which talks to the engine"
    ) -> T:
        """Call a function on rank 0, and return its result on all ranks.

        Args:
            trainer: Knows this process's rank.
            function: What rank 0 does.
            what: What the other ranks wait for, as a message shows it.

        Raises:
            EngineError: On every rank, if the function raised it; InputError likewise.
        """
        if trainer.world_size == 1:
            return function()
        self._open()
        outcome: list[Any] = [None]
        failure: EngineError | InputError | None = None
        if trainer.is_global_zero:
            try:
                outcome = [(function(), None)]
            except (EngineError, InputError) as error:
                failure, outcome = error, [(None, (isinstance(error, InputError), str(error)))]
        with waiting_for_ranks(trainer, what, "the other ranks"):
            torch.distributed.broadcast_object_list(outcome, src=0, group=self.group)
        result, problem = outcome[0]
        if problem is not None:
            raise failure or (InputError if problem[0] else EngineError)(problem[1])
        return result

    def gather(self, trainer: Trainer, value: T, what: str) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank; `what` is waited for."""
        if trainer.world_size > 1:
            self._open()
        return gather_from_ranks(trainer, value, what, self.group)

    def _open(self) -> None:
        if self.group is None:
            timeout = timedelta(seconds=self.deadline_s)
            self.group = torch.distributed.new_group(backend="gloo", timeout=timeout)
