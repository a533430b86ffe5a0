"""Figures of optimizer steps and of held-out rows, over batches and ranks."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
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
    """

    full_state_update = False
    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, mean: float, weight: float) -> None:
        """Add a batch's mean over `weight` rows or tokens."""
        self.total += mean * weight
        self.weight += weight

    def compute(self) -> Tensor:
        """Return the mean, fp32."""
        return (self.total / self.weight.clamp(min=1)).float()


class HeldOutFigures(nn.ModuleDict):
    """Means and largest values over held-out batches, a Metric by name, made when the name first comes."""

    def __init__(self) -> None:
        super().__init__()
        # A key has no dot, a name may have some.
        self.keys_of: dict[str, str] = {}

    def add(self, means: dict[str, Any], count: int, largest: dict[str, float], device: torch.device) -> None:
        """Add a batch: means over `count` rows or tokens, and largest values."""
        for name, value in means.items():
            self.find(name, WeightedMean, device).update(float(value), count)
        for name, value in largest.items():
            self.find(name, MaxMetric, device).update(value)

    def find(self, name: str, kind: type[Metric], device: torch.device) -> Metric:
        """Return the Metric of a name."""
        key = self.keys_of.setdefault(name, name.replace(".", "_"))
        if key not in self:
            self[key] = kind().to(device)
        metric = self[key]
        assert isinstance(metric, Metric)
        return metric

    def collect(self, trainer: Trainer, device: torch.device) -> dict[str, Metric]:
        """Return the Metrics by name, the same ones on all ranks, which call this together.

        A rank without a held-out batch has made none.
        """
        own = {name: type(self[key]) for name, key in self.keys_of.items()}
        parts = gather_from_ranks(trainer, own, "the names of all ranks' figures")
        kinds: dict[str, Any] = {name: kind for part in parts for name, kind in part.items()}
        return {name: self.find(name, kind, device) for name, kind in kinds.items()}
