"""The process group in which trainer and vLLM workers meet; imported on both sides, needs torch alone."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import BroadcastOptions, ProcessGroupGloo, Store

LOOPBACK = "127.0.0.1"


def join_group(store: Store, rank: int, world_size: int, timeout_s: float, host: str) -> ProcessGroupGloo:
    """Join the group that meets at a store; blocks until all have come. Rank 0 is the trainer.

    A group whose trainer is on the loopback interface listens there alone; any other on the interface of the
    machine's host name.
    """
    timeout = timedelta(seconds=timeout_s)
    address = socket.gethostbyname(host)
    if not ipaddress.ip_address(address).is_loopback:
        return ProcessGroupGloo(store, rank, world_size, timeout)
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, world_size, options)


def from_trainer() -> BroadcastOptions:
    """Say that a broadcast's source is rank 0."""
    options = BroadcastOptions()
    options.rootRank = 0
    return options
