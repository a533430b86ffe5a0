"""Models with sharded weights, and the versions under which they are pushed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from rlt_lightning.models.load import load_model

VERSION = "0123abcd-000007"


def sharded_model(strategy: str, name: str) -> Any:
    """The model as FSDP2 or DeepSpeed ZeRO-3 leaves it on this rank."""
    model = load_model(name)
    if strategy == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles for a minute
    deepspeed.init_distributed("gloo")
    deepspeed.zero.Init(module=model, dtype=torch.float32)
    return model


def require_strategy(strategy: str) -> None:
    if strategy == "zero3" and find_spec("deepspeed") is None:
        pytest.skip("needs the deepspeed extra")
