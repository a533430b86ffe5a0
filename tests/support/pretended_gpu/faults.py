"""Faults that a CPU forgives and a GPU does not, each planted in a small module."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

GPU = torch.device("cuda", 0)


class Faulty(nn.Module):
    """A layer whose forward ends with a fault."""

    def __init__(self, fault: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.fault = fault

    def forward(self, x: Tensor) -> object:
        return self.fault(self.layer(x))


ON_ONE_RANK: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "a tensor made on the CPU": (lambda x: x + torch.ones(4), "found at least two devices, cuda:0 and cpu!"),
    "a mask made on the CPU": (
        lambda x: x.masked_fill(torch.ones(4, dtype=torch.bool), 0.0),
        "found at least two devices, cuda:0 and cpu!",
    ),
    "a generator of the CPU": (
        lambda x: x.detach().uniform_(generator=torch.Generator().manual_seed(0)),
        "Expected a 'cuda' device type for generator but found 'cpu'",
    ),
    "a pinned copy of a tensor of the device": (
        lambda x: x.detach().pin_memory(),
        "only dense CPU tensors can be pinned",
    ),
    "an operator without a kernel": (lambda x: x.detach().to_mkldnn(), "it has no CUDA kernel"),
    "an operator without a kernel for the type": (
        lambda x: x.detach().long() @ x.detach().long().T,
        "not implemented for 'Long'",
    ),
    "flash attention in fp32": (
        lambda x: torch.ops.aten._flash_attention_forward(
            *[x.detach().view(-1, 1, 4)] * 3,
            *[torch.tensor([0, 4], device=GPU).int()] * 2,
            4,
            4,
            0,
            True,
            False,
        ),
        "only support fp16 and bf16",
    ),
    "a NumPy array of a tensor of the device": (
        lambda x: x.detach().numpy(),
        "can't convert cuda:0 device type",
    ),
    "a device that is not there": (lambda x: x.to("cuda:7"), "invalid device ordinal 7"),
}


def require_found(name: str) -> None:
    """Run the module with this fault, which must be refused as a GPU refuses it."""
    fault, message = ON_ONE_RANK[name]
    with pytest.raises((RuntimeError, TypeError), match=re.escape(message)):
        Faulty(fault).to(GPU)(torch.ones(4, 4, device=GPU))


def call_on_one_rank(rank: int) -> None:
    """Let rank 0 reduce once more than the others."""
    dist.all_reduce(torch.ones(2, device=f"cuda:{rank}"))
    if rank == 0:
        dist.all_reduce(torch.ones(3, device="cuda:0"))


def reduce_on_the_cpu(rank: int) -> None:
    dist.all_reduce(torch.ones(2))


ON_TWO_RANKS = {
    call_on_one_rank: "on rank 0 only, not on rank 1: all_reduce sum Float[3]",
    reduce_on_the_cpu: "No backend type associated with device type cpu",
}


def plant_on_ranks(rank: int, name: str) -> None:
    """Run a fault of several ranks, which must be found."""
    from pretended_gpu import collectives

    if not dist.is_initialized():
        dist.init_process_group("nccl", rank=rank, world_size=2, timeout=timedelta(seconds=20))
    collectives.WAIT_S = 2.0
    [(fault, message)] = [item for item in ON_TWO_RANKS.items() if item[0].__name__ == name]
    if fault is call_on_one_rank and rank == 1:
        fault(rank)
        return
    with pytest.raises(RuntimeError, match=re.escape(message)):
        fault(rank)
