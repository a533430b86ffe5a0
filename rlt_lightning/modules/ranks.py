"""What a step needs of the other ranks; all ranks call each of these together."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlt_lightning.numerics.finite import FiniteChecks
from rlt_lightning.numerics.transfers import upload
from rlt_lightning.rollouts.step import StepBatch
from rlt_lightning.run.ranks import gather_from_ranks, raise_from_ranks

T = TypeVar("T")


class Ranks:
    """The ranks of a trainer.

    Args:
        trainer: The trainer; None: there is one rank.
        device: Where this rank computes.
        sharding: How the strategy stores weights.
    """

    def __init__(self, trainer: Any = None, device: torch.device | None = None, sharding: Any = None) -> None:
        self.trainer, self.device, self.sharding = trainer, device, sharding
        self.world_size: int = 1 if trainer is None else trainer.world_size
        # Whether the forwards of all ranks meet.
        self.sharded: bool = sharding is not None and sharding.sharded

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Return the strategy's context for a micro-batch; the last backward of an update sums gradients."""
        return nullcontext() if self.sharding is None else self.sharding.micro_batch(last)

    def max(self, *numbers: float) -> list[float]:
        """Return the largest value of each number, in fp32."""
        return self.reduce(torch.tensor(numbers, dtype=torch.float32, device="cpu"), "max")

    def sum(self, *numbers: float) -> list[float]:
        """Return the sum of each number."""
        return self.reduce(torch.tensor(numbers, dtype=torch.float64, device="cpu"), "sum")

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return any(self.max(flag))

    def reduce(self, numbers: Tensor, operation: str) -> list[float]:
        """Reduce numbers in main memory, all in one collective."""
        if self.world_size > 1:
            numbers = self.trainer.strategy.reduce(upload(numbers, self.device), reduce_op=operation)
        return numbers.tolist()

    def sum_tensor(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor; Lightning's sum would also wait at a barrier."""
        values = upload(values, self.device)
        if self.world_size > 1:
            torch.distributed.all_reduce(values)
        return values

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks."""
        return [value] if self.trainer is None else gather_from_ranks(self.trainer, value)

    def raise_together(self, step: StepBatch) -> None:
        """Raise an error on all ranks if one of them has failed.

        So no rank waits for one that has failed. The host waits for the device once.

        Raises:
            NonFiniteError: If a model has computed NaN or an infinity.
            Exception: Whatever a reward or a loss term has raised.
        """
        failed = step.find_failed()
        if self.world_size > 1:
            failed = upload(failed.float(), self.device)
            torch.distributed.all_reduce(failed, torch.distributed.ReduceOp.MAX)
        if failed:
            raise_from_ranks(self.trainer, step.find_failure())
        step.checks = FiniteChecks()
