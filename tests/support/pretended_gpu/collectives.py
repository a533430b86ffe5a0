"""NCCL's rules over gloo: every collective is compared with the other ranks' before it begins, and recorded.

Real ranks that call different collectives hang, or take each other's numbers for their own; here the first
difference is an error that names the lines.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from pretended_gpu.load import ext
from pretended_gpu.where import Place, find_place

BACKEND = "pretended"  # what nccl becomes
WAIT_S = 60.0  # for the other ranks to come to a collective


class CollectiveError(RuntimeError):
    """Ranks do not come to the same collective."""


class Collective(NamedTuple):
    """What one rank asked for: `all_reduce sum`, ` Float[2]`."""

    what: str
    tensors: str
    place: Place


# Of this process, in order.
RECORD: list[Collective] = []


class Ranks:
    """The ranks of a process group, which tell each other through its store what they come to."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = dist.PrefixStore("pretended", store), rank, size
        self.number = 0

    def begin(self, what: str, tensors: str) -> None:
        """Record a collective and compare it with the other ranks'.

        Raises:
            CollectiveError: If another rank comes to another one, or to none.
        """
        place = find_place()
        RECORD.append(Collective(what, tensors, place))
        if what.startswith(("send", "recv")) or self.size == 1:
            return
        self.store.set(f"{self.number}/{self.rank}", f"{what}{tensors} at {place}")
        for other in range(self.size):
            if other != self.rank:
                self.compare(other, f"{what}{tensors}", place)
        self.number += 1

    def compare(self, other: int, own: str, place: Place) -> None:
        """Compare this rank's collective with another's."""
        key = f"{self.number}/{other}"
        try:
            self.store.wait([key], timedelta(seconds=WAIT_S))
        except dist.DistStoreError as error:
            raise CollectiveError(
                f"collective {self.number} on rank {self.rank} only, not on rank {other}: {own} at {place}"
            ) from error
        theirs = self.store.get(key).decode()
        if theirs.partition(" at ")[0] != own:
            raise CollectiveError(
                f"collective {self.number} differs: on rank {self.rank} {own} at {place}, "
                f"on rank {other} {theirs}"
            )


def create_group(options: Any, *_: Any) -> Any:
    """Make the process group of a backend that PyTorch asks for by name."""
    rank, size = options.group_rank, options.group_size
    inner = dist.ProcessGroupGloo(options.store, rank, size, options.timeout)
    return ext.build_process_group(inner, rank, size, Ranks(options.store, rank, size).begin)


def translate(backend: Any) -> Any:
    """Return the name of a backend with nccl replaced."""
    return backend.replace("nccl", BACKEND) if isinstance(backend, str) else backend


INIT, NEW = dist.init_process_group, dist.new_group


def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("device_id", None)
    return INIT(translate(backend), *args, **kwargs)


def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("device_id", None)
    return NEW(ranks, timeout, translate(backend), *args, **kwargs)


dist.Backend.register_backend(BACKEND, create_group, extended_api=True, devices=["cuda"])
for module in (dist, dist.distributed_c10d):
    module.init_process_group, module.new_group = init_process_group, new_group
    module.is_nccl_available = lambda: True
