"""FSDP2 with our checkpoints: whole weights under their names."""

from __future__ import annotations

from lightning.pytorch.strategies import ModelParallelStrategy
from typing_extensions import override

from rlt_lightning.checkpoints.io import NamedCheckpoints


class FSDP2(NamedCheckpoints, ModelParallelStrategy):
    """PyTorch's fully_shard over all processes, with weights sharded by `FullyShard`."""

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()
