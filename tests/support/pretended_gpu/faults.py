"""Faults that a CPU forgives and a GPU does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

GPU = torch.device("cuda", 0)
TWO_DEVICES = "found at least two devices, cuda:0 and cpu!"


def call_flash_attention(x: Tensor) -> object:
    """Call it with one sequence, in the type of x."""
    heads, ends = x.view(-1, 1, 4), torch.tensor([0, 4], device=GPU).int()
    lengths = heads, heads, heads, ends, ends, 4, 4
    return torch.ops.aten._flash_attention_forward(*lengths, 0, True, False)


# What is done to a tensor of the device, and what a GPU says to it.
ON_ONE_RANK: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "a tensor made on the CPU": (lambda x: x + torch.ones(4), TWO_DEVICES),
    "a mask made on the CPU": (lambda x: x.masked_fill(torch.ones(4, dtype=torch.bool), 0.0), TWO_DEVICES),
    "a generator of the CPU": (
        lambda x: x.uniform_(generator=torch.Generator().manual_seed(0)),
        "Expected a 'cuda' device type for generator but found 'cpu'",
    ),
    "a pinned copy of a tensor of the device": (Tensor.pin_memory, "only dense CPU tensors can be pinned"),
    "an operator without a kernel": (Tensor.to_mkldnn, "it has no CUDA kernel"),
    "an operator without a kernel for the type": (
        lambda x: x.long() @ x.long(),
        "not implemented for 'Long'",
    ),
    "flash attention in fp32": (call_flash_attention, "only support fp16 and bf16"),
    "a NumPy array of a tensor of the device": (Tensor.numpy, "can't convert cuda:0 device type"),
    "a device that is not there": (lambda x: x.to("cuda:7"), "invalid device ordinal 7"),
}


def require_found(name: str) -> None:
    """Make this fault, which must be refused as a GPU refuses it."""
    fault, message = ON_ONE_RANK[name]
    with pytest.raises((RuntimeError, TypeError), match=re.escape(message)):
        fault(torch.ones(4, 4, device=GPU))


def plant_on_ranks(rank: int, fault: str) -> None:
    """Make a fault of two ranks, which must be found: a call on one only, or with a tensor of the CPU."""
    from pretended_gpu import collectives

    if not dist.is_initialized():
        dist.init_process_group("nccl", rank=rank, world_size=2, timeout=timedelta(seconds=20))
    collectives.WAIT_S = 2.0
    if fault == "call on one rank":
        dist.all_reduce(torch.ones(2, device=f"cuda:{rank}"))
        if rank == 0:
            message = "on rank 0 only, not on rank 1: all_reduce sum Float[3]"
            with pytest.raises(RuntimeError, match=re.escape(message)):
                dist.all_reduce(torch.ones(3, device=GPU))
    else:
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(torch.ones(2))
