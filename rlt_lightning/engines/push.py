"""Push new weights to vLLM workers: through a shared buffer, or over TCP.

    WeightPush           pause ─▶ start ─▶ weights ─▶ finish ─▶ reset the prefix cache ─▶ resume
    ├── BucketPush       fills one buffer again and again; all workers load what is in it
    │   ├── IPCPush      shares the buffer with the workers of this machine
    │   └── GlooPush     broadcasts it over TCP
    └── NoPush           nothing: workers keep the weights they loaded

Sharded weights are gathered a bucket at a time. Each ═ is a collective of the trainer's ranks. None stands
between the first and the last part of a send: the other ranks would wait in it for rank 0, which waits for
the workers. Trainers that gathered while they sent have hung (https://github.com/huggingface/trl/issues/7103).

    rank 0   ═ gather ─▶ send ═ gather ─▶ send ═ ... ─▶ finish
    rank 1   ═ gather         ═ gather         ═ ...
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from rlt_lightning.engines.base import NamedTensor
from rlt_lightning.engines.client import JSON, WorkerClient, WorkerError
from rlt_lightning.engines.threads import run_in_background
from rlt_lightning.models.weights import gather_in_groups
from rlt_lightning.types import InputError
from rlt_lightning.worker.gloo import LOOPBACK, build_broadcast_options, join_group
from rlt_lightning.worker.ipc import GPUBuffer, HostBuffer

T = TypeVar("T")

# Bytes; where a tensor begins in a buffer.
ALIGNMENT = 16


class WeightPush(ABC):
    """Bring the trainer's weights into vLLM workers while they hold their requests.

    Args:
        bucket_mib: Weights, in MiB, that the trainer holds a second time at most: gathered from its ranks, or
            on their way. A larger tensor that must be whole is a bucket by itself.
        timeout_s: Deadline of every single transfer and of every call to a worker.
    """

    backend: ClassVar[str | None]  # what the worker's --weight-transfer-config names; None: it needs none

    def __init__(self, bucket_mib: int = 256, timeout_s: float = 300.0) -> None:
        if bucket_mib < 1 or timeout_s <= 0:
            raise InputError(
                f"A weight push needs bucket_mib >= 1 and timeout_s > 0, but got {bucket_mib} and "
                f"{timeout_s}."
            )
        self.bucket_bytes = bucket_mib * 2**20
        self.timeout_s = timeout_s

    @abstractmethod
    def push(self, named_tensors: list[NamedTensor], workers: list[WorkerClient], version: str) -> None:
        """Push to all workers at once.

        Every tensor is gathered exactly once, whatever fails: other ranks of the trainer take part in that.

        Args:
            named_tensors: The trainer's weights, which may be sharded.
            workers: Those to push to.
            version: What the workers will call these weights.

        Raises:
            EngineError: If it failed; the weights of all workers are then undefined until the next push.
        """

    def begin(self, worker: WorkerClient) -> None:
        """Hold the worker's requests, and begin an update in place of one that was broken off."""
        self.post(worker, "/pause?mode=keep")
        self.post(worker, "/collective_rpc", {"method": "abandon_weight_update"})
        self.post(worker, "/start_weight_update")

    def finish(self, worker: WorkerClient, version: str) -> None:
        """End an update: from now on the worker says that it holds this version."""
        self.post(worker, "/finish_weight_update", {"weight_version": version})

    def resume(self, worker: WorkerClient) -> None:
        """Let the worker forget keys and values of the old weights, and serve again."""
        self.post(worker, "/reset_prefix_cache?reset_running_requests=true")
        self.post(worker, "/resume")

    def post(self, worker: WorkerClient, path: str, body: JSON | None = None) -> JSON:
        """Call a worker and wait for its answer, in whatever thread this is."""
        return asyncio.run(worker.call("POST", path, body, self.timeout_s))

    def disconnect(self) -> None:  # noqa: B027  (most backends hold no connection)
        """Forget connections, which the loss of a worker has broken."""

    def close(self) -> None:
        """Free the memory that is held between pushes."""
        self.disconnect()


class NoPush(WeightPush):
    """Push nothing: workers serve the weights they loaded, and may be any `vllm serve FOLDER`.

    For evaluation and generation with a trained model. Workers are asked only what every vLLM server
    answers. If there is a trainer, its weights are compared with theirs as after any push.
    """

    backend = None

    def __init__(self) -> None:
        super().__init__()
        self.version: str | None = None  # the version that the workers are taken to hold

    def push(self, named_tensors: list[NamedTensor], workers: list[WorkerClient], version: str) -> None:
        """Refuse weights that have changed since the first push."""
        if self.version not in (None, version):
            raise InputError(
                "NoPush leaves workers the weights that they serve, but the trainer's have changed. Leave "
                "the engine's push out to train."
            )
        self.version = version

    def close(self) -> None:
        """Accept whatever weights the next trainer has."""
        super().close()
        self.version = None


class BucketPush(WeightPush):
    """Fill a buffer with weights, let all workers load it, and fill it again; longer tensors go in pieces.

    Weights travel in the workers' data type if it is narrower than the trainer's.
    """

    backend = "rlt"

    def __init__(self, bucket_mib: int = 256, timeout_s: float = 300.0) -> None:
        super().__init__(bucket_mib, timeout_s)
        # Within a push:
        self.buffer: Any = None  # its bytes are `buffer.tensor`
        self.parts: list[JSON] = []  # what lies in it, as `TensorReader.read` reads it
        self.filled = 0  # bytes of it
        self.workers_dtype: torch.dtype | None = None

    def push(self, named_tensors: list[NamedTensor], workers: list[WorkerClient], version: str) -> None:
        """See `WeightPush.push`."""
        with gathering(named_tensors, self.bucket_bytes) as groups:
            call_each(workers, self.begin)
            self.workers_dtype = find_common_dtype(workers)
            names = iter([name for name, _ in named_tensors])
            try:
                for tensors in groups:
                    while tensors:  # keep none of them while the next are gathered
                        self.put(next(names), tensors.pop(0), workers)
                self.send_all(workers)
                call_each(workers, partial(self.finish, version=version))
            finally:
                self.free()  # when the workers have let go of it: a GPU's memory stays taken until then
            call_each(workers, self.resume)

    def put(self, name: str, tensor: Tensor, workers: list[WorkerClient]) -> None:
        """Copy a tensor into the buffer; send what lies there whenever it is full."""
        dtype = choose_narrower_dtype(tensor.dtype, self.workers_dtype)
        facts = {"name": name, "dtype": str(dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        if self.buffer is None:
            self.buffer = self.allocate(tensor.device, workers)
        begin = 0
        for piece in split_pieces(tensor, dtype, self.bucket_bytes):
            num_bytes = piece.numel() * dtype.itemsize
            if self.filled + num_bytes > self.bucket_bytes:
                self.send_all(workers)
            target = self.buffer.tensor[self.filled : self.filled + num_bytes]
            target.view(dtype).copy_(piece)
            self.parts.append(facts | {"begin": begin, "offset": self.filled, "num_bytes": num_bytes})
            begin += num_bytes
            self.filled += -(-num_bytes // ALIGNMENT) * ALIGNMENT

    def send_all(self, workers: list[WorkerClient]) -> None:
        """Let all workers load what lies in the buffer."""
        if self.parts:
            self.send(self.parts, workers)
        self.parts, self.filled = [], 0

    @abstractmethod
    def allocate(self, device: torch.device, workers: list[WorkerClient]) -> Any:
        """Return a buffer of `bucket_bytes` for weights that lie on a device."""

    @abstractmethod
    def send(self, parts: list[JSON], workers: list[WorkerClient]) -> None:
        """Let all workers load what lies in the buffer; return when it may be filled again."""

    def free(self) -> None:
        """Free the buffer."""
        if self.buffer is not None:
            self.buffer.close()
        self.buffer, self.parts, self.filled = None, [], 0


class IPCPush(BucketPush):
    """Share the buffer with workers on this machine.

    It lies on the trainer's GPU if all workers are on the same one (by turns), else in main memory. The
    workers must run on this machine (Linux), for the same user.

    Args:
        bucket_mib: As in `WeightPush`; the buffer has this size too.
        timeout_s: As in `WeightPush`.
    """

    def allocate(self, device: torch.device, workers: list[WorkerClient]) -> HostBuffer | GPUBuffer:
        """Return a buffer that all workers can open."""
        if device.type == "cuda" and self.all_are_on(device, workers):
            return GPUBuffer(self.bucket_bytes, device)
        return HostBuffer(self.bucket_bytes)

    def all_are_on(self, device: torch.device, workers: list[WorkerClient]) -> bool:
        """Tell whether each worker has one GPU, and all of them this one."""
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        answers = call_each(
            workers, lambda worker: self.post(worker, "/collective_rpc", {"method": "name_gpu"})
        )
        return all(answer.get("results") == [gpu] for answer in answers)

    def send(self, parts: list[JSON], workers: list[WorkerClient]) -> None:
        """See `BucketPush.send`."""
        if self.buffer.tensor.is_cuda:
            torch.cuda.current_stream().synchronize()  # copies within a GPU are still under way

        def update(worker: WorkerClient) -> None:
            info = {"parts": parts, "buffer": self.buffer.share(worker.url)}
            self.post(worker, "/update_weights", {"update_info": info})

        call_each(workers, update)


class GlooPush(BucketPush):
    """Broadcast the buffer over TCP; all workers form one group with the trainer.

    Args:
        bucket_mib: As in `WeightPush`; the buffer has this size too.
        timeout_s: As in `WeightPush`.
        host: Address of this machine that the workers can reach.
    """

    def __init__(self, bucket_mib: int = 256, timeout_s: float = 300.0, host: str = LOOPBACK) -> None:
        super().__init__(bucket_mib, timeout_s)
        self.host = host
        self.store: TCPStore | None = None
        self.group: Any = None  # a ProcessGroupGloo

    def allocate(self, device: torch.device, workers: list[WorkerClient]) -> SentBuffer:
        """Return a buffer in main memory, and meet the workers if this is the first push to them."""
        if self.group is None:
            self.group = self.meet(workers)
        return SentBuffer(self.bucket_bytes, pinned=device.type == "cuda")

    def meet(self, workers: list[WorkerClient]) -> Any:
        """Form a group of the trainer, rank 0, and the model workers of all servers."""
        self.store = self.store or self.open_store()
        prefix, world_size = uuid4().hex, 1
        calls: list[Callable[[], Any]] = []
        size = 1 + sum(worker.num_ranks for worker in workers)
        for worker in workers:
            info = {"host": self.host, "port": self.store.port, "prefix": prefix, "world_size": size}
            # Half our patience: a worker that waits for one that has died is free for the next push in time.
            info |= {"rank_offset": world_size, "timeout_s": self.timeout_s / 2}
            calls.append(partial(self.post, worker, "/init_weight_transfer_engine", {"init_info": info}))
            world_size += worker.num_ranks
        store = PrefixStore(prefix, self.store)
        calls.append(lambda: self.by_gloo(lambda: join_group(store, 0, size, self.timeout_s, self.host)))
        return run_all(calls)[-1]

    def open_store(self) -> TCPStore:
        """Listen only on our address; by default a TCPStore listens on all."""
        try:
            listener = socket.create_server((self.host, 0))
        except OSError as error:
            raise InputError(
                f"GlooPush's host must be an address of this machine, not {self.host} ({error})."
            ) from error
        port, timeout = listener.getsockname()[1], timedelta(seconds=self.timeout_s)
        return TCPStore(self.host, port, None, True, timeout, False, master_listen_fd=listener.detach())

    def send(self, parts: list[JSON], workers: list[WorkerClient]) -> None:
        """See `BucketPush.send`."""
        num_bytes = parts[-1]["offset"] + parts[-1]["num_bytes"]
        content, group = self.buffer.tensor[:num_bytes], self.group
        body = {"update_info": {"parts": parts, "num_bytes": num_bytes}}
        calls: list[Callable[[], Any]] = [
            partial(self.post, worker, "/update_weights", body) for worker in workers
        ]
        calls.append(
            lambda: self.by_gloo(lambda: group.broadcast([content], build_broadcast_options()).wait())
        )
        run_all(calls)

    def by_gloo(self, function: Callable[[], T]) -> T:
        """Call a function; gloo's error, of a closed connection or a missed deadline, is a lost worker's."""
        try:
            return function()
        except RuntimeError as error:
            raise WorkerError(f"The weights could not be sent to a vLLM worker ({error}).", True) from error

    def disconnect(self) -> None:
        """Leave the group."""
        self.group = None


class SentBuffer:
    """A buffer in main memory that nobody else sees, pinned if it is filled from a GPU."""

    def __init__(self, num_bytes: int, pinned: bool) -> None:
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)

    def close(self) -> None:
        """Do nothing: it is freed with the last reference."""


@contextmanager
def gathering(named_tensors: list[NamedTensor], group_bytes: int) -> Iterator[Iterator[list[Tensor]]]:
    """Return groups of whole tensors; gather also those that nobody takes, since the other ranks do."""
    groups = gather_in_groups(named_tensors, group_bytes)
    try:
        yield groups
    finally:
        for _ in groups:
            pass


def split_pieces(tensor: Tensor, dtype: torch.dtype, piece_bytes: int) -> Iterator[Tensor]:
    """Cut a tensor into flat pieces of at most `piece_bytes` in a type, but of one number at least."""
    yield from tensor.detach().reshape(-1).split(max(1, piece_bytes // dtype.itemsize))


def call_each(workers: Sequence[WorkerClient], function: Callable[[WorkerClient], T]) -> list[T]:
    """Call a function for every worker at once; see `run_all`."""
    return run_all([partial(function, worker) for worker in workers])


def run_all(functions: Sequence[Callable[[], T]]) -> list[T]:
    """Run functions at the same time; return what they return, or raise the first error as it comes."""
    futures: list[Future[T]] = [run_in_background(function) for function in functions]
    wait(futures, return_when=FIRST_EXCEPTION)
    for future in futures:
        if future.done() and (error := future.exception()):
            raise error
    return [future.result() for future in futures]


def choose_narrower_dtype(ours: torch.dtype, theirs: torch.dtype | None) -> torch.dtype:
    """Return the worker's type if it has fewer bytes: the worker would round to it anyway."""
    if theirs is None or not ours.is_floating_point or theirs.itemsize >= ours.itemsize:
        return ours
    return theirs


def find_common_dtype(workers: list[WorkerClient]) -> torch.dtype | None:
    """Return the type that all workers compute in; None if they differ."""
    names = {worker.dtype for worker in workers}
    return getattr(torch, names.pop()) if len(names) == 1 else None
