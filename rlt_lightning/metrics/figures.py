"""Average the figures of optimizer steps and of held-out rows over batches and ranks."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torchmetrics import MaxMetric, Metric

from rlt_lightning.numerics.transfers import upload
from rlt_lightning.run.ranks import gather_from_ranks


def gather_equal(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Return all ranks' tensors, of equal shapes, by one collective; torchmetrics would take three."""
    parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, tensor, group=group)
    return parts


class StepMeans(Metric):
    """The figures of one optimizer step, means over ranks, in fp32; all ranks have the same names.

    They are packed, since a Metric for each would meet the other ranks for each.
    """

    full_state_update = False
    packed: Tensor

    def __init__(self) -> None:
        super().__init__(dist_sync_fn=gather_equal)
        self.names: list[str] = []
        self.add_state("packed", torch.zeros(0), dist_reduce_fx="mean")

    def update(self, figures: dict[str, Any]) -> None:
        """Take a step's figures: numbers, and tensors of one number, which stay on their device."""
        tensors = {name: value for name, value in figures.items() if isinstance(value, Tensor)}
        numbers = {name: float(value) for name, value in figures.items() if name not in tensors}
        values = [value.detach().to(self.device, torch.float32).reshape(1) for value in tensors.values()]
        self.names = [*tensors, *numbers]
        self.packed = torch.cat([*values, upload(list(numbers.values()), self.device, torch.float32)])

    def compute(self) -> dict[str, Tensor]:
        """Return the means by name, in main memory: each use of a figure on a GPU would wait for it."""
        return dict(zip(self.names, self.packed.cpu(), strict=True))


class WeightedMean(Metric):
    """The mean over all rows or tokens of batches and ranks; 0 over none.

    MeanMetric drops the weights where it does not look for NaN, and the NaN where it does.

    Args:
        options: Options of torchmetrics' Metric.
    """

    full_state_update = False
    total: Tensor
    weight: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, mean: float, weight: float) -> None:
        """Add a batch's mean over `weight` rows or tokens."""
        self.total += mean * weight
        self.weight += weight

    def compute(self) -> Tensor:
        """Return the mean, fp32."""
        return (self.total / self.weight.clamp(min=1)).float()


class Largest(MaxMetric):
    """The largest value of batches and ranks."""

    full_state_update = False  # so that states of ranks can be merged


class HeldOutFigures:
    """Means and largest values over held-out batches and ranks, a Metric for each name.

    As objects of `self.log` each Metric would meet the other ranks by itself, twice. So `compute` gathers the
    states of all at once, and its result is logged by `self.log_dict`.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, Metric] = {}

    def add(self, means: dict[str, Any], count: int, largest: dict[str, float]) -> None:
        """Add a batch: means over `count` rows or tokens, and largest values."""
        # `compute` merges all ranks' states, in main memory, where NCCL exchanges nothing.
        options: dict[str, Any] = {"sync_on_compute": False}
        for name, value in means.items():
            self.metrics.setdefault(name, WeightedMean(**options)).update(float(value), count)
        for name, value in largest.items():
            self.metrics.setdefault(name, Largest(**options)).update(value)

    def compute(self, trainer: Trainer) -> dict[str, Tensor]:
        """Return the figures of all ranks by name, and begin again; all ranks call this together.

        A rank may lack names, such as one without a held-out batch.
        """
        parts = gather_from_ranks(trainer, self.metrics)
        self.metrics = {}
        merged: dict[str, Metric] = {}
        for part in parts:
            for name, metric in part.items():
                if name in merged:
                    merged[name].merge_state(metric)
                else:
                    merged[name] = metric
        return {name: metric.compute() for name, metric in merged.items()}
