"""The process group in which trainer and vLLM workers meet; both sides import it, and it needs only torch."""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import BroadcastOptions, ProcessGroupGloo, Store

LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"


def join_group(store: Store, rank: int, world_size: int, timeout_s: float, host: str) -> ProcessGroupGloo:
    """Join the group that meets at a store; block until all members have joined. Rank 0 is the trainer.

    If the trainer is on the loopback interface, the group listens only there; otherwise it listens on
    GLOO_SOCKET_IFNAME or, if that is unset or the loopback, on the interface of the machine's host name.
    """
    timeout = timedelta(seconds=timeout_s)
    address = socket.gethostbyname(host)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    if ipaddress.ip_address(address).is_loopback:
        device = ProcessGroupGloo.create_device(hostname=address)
    elif interface == LOOPBACK_INTERFACE:  # set for the ranks of one node
        device = ProcessGroupGloo.create_default_device()
    else:
        device = ProcessGroupGloo.create_device(interface=interface)
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [device]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, world_size, options)


def build_broadcast_options() -> BroadcastOptions:
    """Return the options of a broadcast whose source is rank 0."""
    options = BroadcastOptions()
    options.rootRank = 0
    return options
