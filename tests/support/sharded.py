"""Models with sharded weights, and the versions under which they are pushed."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rlt_lightning.models.load import load_model

VERSION = "0123abcd-000007"


def join_ranks(rank: int, strategy: str = "") -> None:
    """Meet the other rank by gloo, in DeepSpeed too if the strategy is its own."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    if strategy.startswith("zero"):
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles for a minute
        deepspeed.init_distributed("gloo")


def shard(model: Any) -> Any:
    """Shard a module by FSDP2."""
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)


def sharded_model(rank: int, strategy: str, name: str) -> Any:
    """The model as FSDP2 or DeepSpeed ZeRO-3 leaves it on this rank."""
    join_ranks(rank, strategy)
    model = load_model(name)
    if strategy == "fsdp2":
        for layer in model.model.layers:
            shard(layer)
        return shard(model)
    import deepspeed

    deepspeed.zero.Init(module=model, dtype=torch.float32)
    return model
