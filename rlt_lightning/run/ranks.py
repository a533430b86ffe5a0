"""Let the ranks of a run wait for each other, and raise on all of them what one has raised.

Lightning's launcher ends all processes within 5 s when one that it has started has failed; torchrun and SLURM
do so for theirs. When rank 0 ends, however it does, the kernel kills the processes that it has started.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import (
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from torch import distributed

from rlt_lightning.run.jsonl import JsonRow, append_rows
from rlt_lightning.types import InputError
from rlt_lightning.worker.gloo import LOOPBACK, LOOPBACK_INTERFACE

T = TypeVar("T")

PR_SET_PDEATHSIG = 1  # of prctl
# By these a process knows its rank.
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK")
store: distributed.TCPStore | None = None


def join_nodes(num_nodes: int) -> None:
    """Let Lightning start the processes of a node whose launcher names only nodes, as PyTorchJob does.

    Raises:
        InputError: If it names others than the trainer has, or SLURM's variables are not those of srun.
    """
    if SLURMEnvironment.detect() and not TorchElasticEnvironment.detect():  # as Lightning chooses
        try:
            SLURMEnvironment()
        except RuntimeError as error:
            raise InputError(str(error)) from error
        return
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started == 1 or "LOCAL_RANK" in os.environ:
        return
    if started != num_nodes or not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise InputError(
            f"With WORLD_SIZE {started}, as PyTorchJob sets it, trainer.num_nodes must be {started}, and "
            f"RANK, MASTER_ADDR and MASTER_PORT set, but num_nodes is {num_nodes}. Set them, start the "
            "processes by torchrun, or unset WORLD_SIZE."
        )
    del os.environ["WORLD_SIZE"]
    os.environ["NODE_RANK"] = os.environ.pop("RANK")


def require_processes(trainer: Trainer) -> None:
    """Check that there is a process for each device.

    Raises:
        InputError: If a launcher has started fewer or more: the run would be another one, or wait for them.
    """
    number = trainer.num_devices * trainer.num_nodes
    started = trainer.world_size
    if TorchElasticEnvironment.detect() or "LOCAL_RANK" not in os.environ:
        # With one device Lightning's world is 1, whatever a launcher has started.
        started = max(started, int(os.environ.get("WORLD_SIZE", "1")))
    if started != number:
        raise InputError(
            f"trainer.devices {trainer.num_devices} on trainer.num_nodes {trainer.num_nodes} need {number} "
            f"processes, but the launcher has started {started}. Start as many on each node as it "
            "has devices, by torchrun or srun."
        )


def meet(trainer: Trainer) -> None:
    """Check that there is a process for each device, and let those of one node connect on the loopback."""
    require_processes(trainer)
    global store
    store = meet_on_loopback(trainer)


def meet_on_loopback(trainer: Trainer) -> distributed.TCPStore | None:
    """Let the ranks of one node meet on the loopback; PyTorch would listen on all interfaces.

    Returns:
        On rank 0 the store that PyTorch will take, since it has the same port.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    # With these, MASTER_ADDR is the address at which the ranks meet.
    known = (LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment)
    alone = trainer.world_size == 1 or trainer.num_nodes > 1
    if alone or not isinstance(environment, known) or distributed.is_initialized():
        return None
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    # torchrun's store listens where torchrun says.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    os.environ["MASTER_ADDR"] = LOOPBACK
    if trainer.global_rank:
        return None
    port = environment.main_port
    listener = socket.create_server((LOOPBACK, port)).detach()
    return distributed.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener
    )


def end_with_parent() -> None:
    """Let the kernel kill this process when rank 0 ends, if Lightning has started it; only Linux can."""
    # Lightning's launcher sets WORLD_SIZE; the end of a run deletes it.
    is_child = os.environ.get("LOCAL_RANK", "0") != "0" and "WORLD_SIZE" in os.environ
    if is_child and not TorchElasticEnvironment.detect() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def find_global_rank() -> int:
    """Return the rank of this process, which its launcher has set; 0 before anything is launched."""
    # The largest: processes that Lightning starts inherit a RANK of 0, and LOCAL_RANK is 0 on each node.
    return max(int(os.environ.get(name, "0")) for name in RANKS)


class Collectives:
    """Lets ranks wait for each other in a process group; the strategy's would give up earlier.

    Args:
        deadline_s: How long a rank waits for the others.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        # The process group in which ranks wait, made by the first call of all ranks.
        self.group: Any = None

    def on_rank_zero(self, trainer: Trainer, function: Callable[[], T]) -> T:
        """Call a function on rank 0, and return its result on all ranks.

        Raises:
            Exception: On every rank, whichever the function raised.
        """
        if trainer.world_size == 1:
            return function()
        self._open()
        outcome: list[Any] = [None]
        failure: Exception | None = None
        if trainer.is_global_zero:
            try:
                outcome = [(function(), None)]
            except Exception as error:
                failure, outcome = error, [(None, to_sendable(error))]
        distributed.broadcast_object_list(outcome, src=0, group=self.group)
        result, sent = outcome[0]
        if sent is not None:
            raise failure or sent
        return result

    def gather(self, trainer: Trainer, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank."""
        if trainer.world_size > 1:
            self._open()
        return gather_from_ranks(trainer, value, self.group)

    def _open(self) -> None:
        if self.group is None:
            timeout = timedelta(seconds=self.deadline_s)
            self.group = distributed.new_group(backend="gloo", timeout=timeout)


def ask_callbacks(trainer: Any, name: str) -> Any:
    """Return what the first callback that has this attribute says; None without such a callback."""
    callbacks = [] if trainer is None else trainer.callbacks
    return next((getattr(callback, name) for callback in callbacks if hasattr(callback, name)), None)


def raise_from_ranks(trainer: Trainer, error: Exception | None) -> NoReturn:
    """Raise on all ranks the exception of the first one that has one; all ranks call this together.

    Args:
        trainer: Knows the ranks.
        error: What failed on this rank; None: another one has failed.
    """
    failures = gather_from_ranks(trainer, error and to_sendable(error))
    rank, failure = next((rank, failure) for rank, failure in enumerate(failures) if failure is not None)
    if error is not None and rank == trainer.global_rank:
        raise error
    raise failure


def to_sendable(error: Exception) -> Exception:
    """Return an exception that other ranks can raise: itself or, if it cannot be pickled, its message."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a class of the user's does
        copy = None
    return error if isinstance(copy, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


def gather_from_ranks(trainer: Trainer, value: T, group: Any = None) -> list[T]:
    """Return the values of all ranks, in rank order, on every rank; all ranks call this together.

    Args:
        trainer: Knows the ranks.
        value: What this rank gives; it is pickled, so tensors must be on the CPU.
        group: The process group; None: the strategy's.
    """
    if trainer.world_size == 1:
        return [value]
    parts: list[Any] = [None] * trainer.world_size
    distributed.all_gather_object(parts, value, group=group)
    return parts


def gather_rows(trainer: Trainer, rows: list[T]) -> list[T]:
    """Return the rows of all ranks, in rank order, on rank 0; on other ranks nothing."""
    if trainer.world_size == 1:
        return rows
    parts: list[Any] = [None] * trainer.world_size
    distributed.gather_object(rows, parts if trainer.is_global_zero else None)
    return list(chain.from_iterable(parts)) if trainer.is_global_zero else []


def append_from_ranks(trainer: Trainer, path: Path, rows: list[JsonRow]) -> None:
    """Append the rows of all ranks to a JSONL file, in rank order; rank 0 alone gets them, and writes."""
    gathered = gather_rows(trainer, rows)
    if trainer.is_global_zero:
        append_rows(path, gathered)
