"""Weights that lie in shards on two ranks are pushed whole, a bucket at a time."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from fake_worker import FakeWorker
from safetensors.torch import load_file

from rlt_lightning.engines import DiskPush
from rlt_lightning.engines.client import WorkerClient
from rlt_lightning.models.weights import full_shape, gather_in_groups
from rlt_lightning.pretrained import load_model

VERSION = "0123abcd-000007"


def sharded_model(strategy: str, name: str) -> Any:
    """The model as FSDP2 or DeepSpeed ZeRO-3 leaves it on this rank."""
    model = load_model(name)
    if strategy == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles for a minute
    deepspeed.init_distributed("gloo")
    deepspeed.zero.Init(module=model, dtype=torch.float32)
    return model


def rank_main(rank: int, strategy: str, name: str, folder: str, url: str) -> None:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model = sharded_model(strategy, name)
    named_tensors = list(model.named_parameters())
    whole = {key: parameter.shape for key, parameter in load_model(name).named_parameters()}
    held = sum(getattr(p, "ds_tensor", p.data).numel() for _, p in named_tensors)
    if strategy == "fsdp2":
        held = sum(p.to_local().numel() for _, p in named_tensors)
    assert held < 0.6 * sum(shape.numel() for shape in whole.values())  # a rank holds half
    assert {key: full_shape(p) for key, p in named_tensors} == {k: tuple(s) for k, s in whole.items()}
    push = DiskPush(bucket_mib=1, folder=folder)
    if rank == 0:
        failures = push.push(named_tensors, [WorkerClient(url)], VERSION)
        assert failures == {}, failures
    else:
        for _ in gather_in_groups(named_tensors, push.gather_bytes):
            pass
    assert sum(getattr(p, "ds_tensor", p.data).numel() for _, p in named_tensors) <= held * 2  # let go again
    torch.distributed.barrier()


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_sharded_weights_arrive_whole(strategy: str, tiny_model: str, tmp_path: Path) -> None:
    if strategy == "zero3" and find_spec("deepspeed") is None:
        pytest.skip("needs the deepspeed extra")
    with FakeWorker() as worker:
        arguments = (strategy, tiny_model, str(tmp_path / "weights"), worker.url)
        ranks.call("test_sharded_push:rank_main", tmp_path, *arguments)
    assert worker.version == VERSION
    files = sorted((tmp_path / "weights" / VERSION).glob("*.safetensors"))
    assert len(files) == 2  # the embedding, larger than a bucket, and the rest
    arrived = {name: tensor for path in files for name, tensor in load_file(path).items()}
    for name, tensor in load_model(tiny_model).named_parameters():
        assert torch.equal(arrived.pop(name), tensor), name
    assert arrived == {}
