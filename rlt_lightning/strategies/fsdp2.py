"""FSDP2 with our checkpoints, which store whole weights by name."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from typing_extensions import override

from rlt_lightning.checkpoints.io import NamedCheckpoints

# Of free memory, what whole gradients may take: moments and activations come on top.
WHOLE_GRADIENTS_FRAC = 0.25


class FSDP2(NamedCheckpoints, ModelParallelStrategy):
    """PyTorch's fully_shard over all processes, with weights sharded by `FullyShard`.

    Args:
        reduce_every_micro_batch: Whether processes add up gradients after every micro-batch, and keep shards.
            False: only after an update's last one; until then each process keeps the whole gradients of
            all trained weights. "auto": false where these fit, by `whole_gradients_fit`, on every process.
            Both give the same sums, by another order of additions.
        kwargs: Options of Lightning's strategy, such as timeout.
    """

    def __init__(self, reduce_every_micro_batch: bool | Literal["auto"] = "auto", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reduce_every_micro_batch: bool | Literal["auto"] = reduce_every_micro_batch

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()


def whole_gradients_fit(num_bytes: float, free_bytes: float) -> bool:
    """Return whether whole gradients take at most a quarter of a device's memory that is free at the start.

    All weights are loaded then; AdamW's moments and activations are not there yet.
    """
    return num_bytes <= WHOLE_GRADIENTS_FRAC * free_bytes


def measure_free_bytes(device: torch.device, num_processes: int) -> float:
    """Return the memory that a process can still take.

    Args:
        device: Of the process.
        num_processes: Processes on this machine. On CPUs each can take its part of the machine's memory: what
            is free changes too much from run to run, and a resumed run must decide as before.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / num_processes
