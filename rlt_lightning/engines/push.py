"""Push new weights to vLLM workers: over gloo (the default) or through a folder; nccl.py: between GPUs.

    WeightPush       pause ─▶ start ─▶ transfer ─▶ finish ─▶ reset the prefix cache ─▶ resume
    ├── GlooPush     broadcasts tensor after tensor over TCP
    ├── NCCLPush     lets vLLM broadcast from GPU to GPU (nccl.py)
    ├── DiskPush     writes a folder of safetensors files
    │   └── AdapterPush   only those of a LoRA
    └── NoPush       nothing: workers have weights of their own

GlooPush copies weights from a GPU, or to another data type, into one buffer while the other is sent:

    fill A │ fill B │ fill A │ …
           │ send A │ send B │ …
"""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from rlt_lightning.engines.base import EngineError, NamedTensor
from rlt_lightning.engines.client import JSON, WorkerClient, WorkerError
from rlt_lightning.engines.threads import run_in_background
from rlt_lightning.gloo import LOOPBACK, build_broadcast_options, join_group
from rlt_lightning.models.lora import ADAPTER, ADAPTER_FILE, save_adapter_config
from rlt_lightning.models.weights import full_shape, gather_in_groups
from rlt_lightning.types import InputError

Failures = dict[str, Exception]  # URL of a worker -> what went wrong there
# Matches what VLLMEngine calls a version of the weights, and DiskPush the folder that it writes it into.
VERSION_FOLDER = re.compile(r"[0-9a-f]{8}-\d{6}(\.tmp)?")
# The ranks that --max-lora-rank takes.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class WeightPush(ABC):
    """Bring the trainer's weights into vLLM workers while they hold their requests.

    For each worker: pause, start, transfer, finish with the new version, reset the prefix cache, resume. A
    worker that fails on the way is left out of the rest; its weights are then undefined until the next push.
    Sharded weights are gathered a bucket at a time: all ranks gather it, then rank 0 sends it, and only then
    is the next gathered.

    Args:
        bucket_mib: Weights, in MiB, that the trainer holds a second time at most: gathered from its ranks, or
            on their way. A larger tensor that must be whole is a bucket by itself.
        timeout_s: Deadline of every single transfer and of every call to a worker.
    """

    backend: ClassVar[str | None]  # what the worker's --weight-transfer-config names; None: it needs none
    takes_adapters: ClassVar[bool] = False  # whether it pushes a LoRA's matrices rather than merged weights
    dtype: torch.dtype | None = None  # in which weights travel; None: as the trainer holds them

    def __init__(self, bucket_mib: int = 256, timeout_s: float = 300.0) -> None:
        if bucket_mib < 1 or timeout_s <= 0:
            raise InputError(
                f"A weight push needs bucket_mib >= 1 and timeout_s > 0, but got {bucket_mib} and "
                f"{timeout_s}."
            )
        self.bucket_bytes = bucket_mib * 2**20
        self.timeout_s = timeout_s
        self.prepared: list[WorkerClient] | None = None  # until the push; None: none are

    def open(self, model: Any, folder: Path) -> None:  # noqa: B027  (most backends need neither)
        """Get ready, before workers are started.

        Args:
            model: The trainer's teacher.
            folder: A place in the run folder, for backends that write.
        """

    def launch_options(self) -> tuple[list[str], dict[str, str]]:
        """Return further arguments and environment variables that workers must be started with."""
        return [], {}

    @property
    def gather_bytes(self) -> int:
        """Return the bytes of weights that every rank gathers at once."""
        return self.bucket_bytes

    def push(self, named_tensors: list[NamedTensor], workers: list[WorkerClient], version: str) -> Failures:
        """Push to all workers at once and return those that failed, with the reason.

        Every tensor is gathered exactly once, whatever fails: other ranks of the trainer take part in that.

        Args:
            named_tensors: The trainer's weights, which may be sharded.
            workers: Those to push to; if `prepare_all` was called, those that it prepared.
            version: What the workers will call these weights.
        """
        failures = {} if self.prepared is not None else self.prepare_all(workers)
        workers, self.prepared = self.prepared or [], None
        self.transfer(named_tensors, workers, version, failures)
        call_each([worker for worker in workers if worker.url not in failures], self.conclude, failures)
        return failures

    def prepare_all(self, workers: list[WorkerClient]) -> Failures:
        """Get workers ready for the next `push`; return those that failed, with the reason.

        Nothing is gathered meanwhile, so the trainer's other ranks need not take part, and can wait for it.
        """
        failures: Failures = {}
        self.prepared = call_each(workers, self.prepare, failures)
        return failures

    def prepare(self, worker: WorkerClient) -> None:
        """Hold the worker's requests."""
        self.post(worker, "/pause?mode=keep")

    @abstractmethod
    def transfer(
        self, named_tensors: list[NamedTensor], workers: list[WorkerClient], version: str, failures: Failures
    ) -> None:
        """Start, send, finish; add the workers that fail to `failures`."""

    def conclude(self, worker: WorkerClient) -> None:
        """Forget keys and values of the old weights, and serve again."""
        self.post(worker, "/reset_prefix_cache?reset_running_requests=true")
        self.post(worker, "/resume")

    def start(self, worker: WorkerClient) -> None:
        """Begin an update, in place of one that was broken off."""
        self.post(worker, "/collective_rpc", {"method": "abandon_weight_update"})
        self.post(worker, "/start_weight_update")

    def finish(self, worker: WorkerClient, version: str) -> None:
        """End an update: from now on the worker says that it holds this version."""
        self.post(worker, "/finish_weight_update", {"weight_version": version})

    def post(self, worker: WorkerClient, path: str, body: JSON | None = None, in_words: bool = False) -> JSON:
        """Call a worker and wait for its answer, in whatever thread this is."""
        return asyncio.run(worker.call("POST", path, body, self.timeout_s, in_words))

    def close(self) -> None:
        """Free what is held between pushes."""
        self.prepared = None


class NoPush(WeightPush):
    """Push nothing: workers serve weights of their own, and may be any `vllm serve FOLDER`.

    For evaluation and generation with a trained model. Workers are asked only what every vLLM server
    answers. If there is a trainer, its weights are compared with theirs as after any push.
    """

    backend = None

    def __init__(self) -> None:
        super().__init__()
        self.version: str | None = None  # the version that the workers are taken to hold

    def prepare(self, worker: WorkerClient) -> None:
        """Do nothing: the worker keeps serving."""

    def transfer(
        self, named_tensors: list[NamedTensor], workers: list[WorkerClient], version: str, failures: Failures
    ) -> None:
        """Refuse weights that have changed since the first push."""
        if self.version not in (None, version):
            raise InputError(
                "NoPush leaves workers the weights that they serve, but the trainer's have changed. Train "
                "with rlt_lightning.engines.GlooPush."
            )
        self.version = version

    def conclude(self, worker: WorkerClient) -> None:
        """Do nothing, as in `prepare`."""

    def close(self) -> None:
        """Accept whatever weights the next trainer has."""
        super().close()
        self.version = None


class GlooPush(WeightPush):
    """Broadcast tensor after tensor over TCP; each server's workers form one group with the trainer.

    Args:
        bucket_mib: As in `WeightPush`; longer tensors go in pieces of this size. Two of them are held in
            pinned main memory where the weights lie on a GPU: one is filled while the other is sent.
        timeout_s: As in `WeightPush`.
        host: Address of this machine that the workers can reach.
        dtype: Data type in which weights travel, such as bfloat16; None: as the trainer holds them.
    """

    backend = "gloo"

    def __init__(
        self, bucket_mib: int = 64, timeout_s: float = 300.0, host: str = LOOPBACK, dtype: str | None = None
    ) -> None:
        super().__init__(bucket_mib, timeout_s)
        self.host = host
        self.dtype = None if dtype is None else parse_dtype(dtype)
        self.store: TCPStore | None = None
        self.lock = Lock()
        self.groups: dict[str, tuple[int, Any]] = {}  # URL -> incarnation that joined, group
        self.staging = Staging(self.bucket_bytes)
        self.in_flight: list[tuple[str, Any]] = []  # URL, and what gloo still sends there

    def prepare(self, worker: WorkerClient) -> None:
        """Hold the worker's requests and, on the first push to it, meet."""
        super().prepare(worker)
        if self.groups.get(worker.url, (None,))[0] != worker.incarnation:
            self.groups[worker.url] = (worker.incarnation, self.meet(worker))
        self.start(worker)

    def meet(self, worker: WorkerClient) -> ProcessGroupGloo:
        """Form a group of the trainer and the server's workers."""
        with self.lock:  # several workers are prepared at the same time, and meet at one store
            self.store = self.store or self.open_store()
        prefix, world_size = uuid4().hex, 1 + worker.num_ranks
        info = {"host": self.host, "port": self.store.port, "prefix": prefix, "world_size": world_size}
        # Twice our patience: a worker must not give up while the trainer waits for another that hangs.
        body = {"init_info": info | {"timeout_s": 2 * self.timeout_s}}
        joined = run_in_background(lambda: self.post(worker, "/init_weight_transfer_engine", body))
        store = PrefixStore(prefix, self.store)
        group = run_in_background(lambda: join_group(store, 0, world_size, self.timeout_s, self.host))
        meeting: list[Future[Any]] = [joined, group]
        wait(meeting, return_when=FIRST_COMPLETED)
        if joined.done():
            joined.result()  # a worker that refuses says why; the group would be waited for in vain
        result = group.result()
        joined.result()
        return result

    def open_store(self) -> TCPStore:
        """Listen only on our address; by default a TCPStore listens on all."""
        try:
            listener = socket.create_server((self.host, 0))
        except OSError as error:
            raise WorkerError(
                f"GlooPush's host must be an address of this machine, but '{self.host}' is none ({error}). "
                "Correct it.",
                retryable=False,
            ) from error
        port, timeout = listener.getsockname()[1], timedelta(seconds=self.timeout_s)
        return TCPStore(self.host, port, None, True, timeout, False, master_listen_fd=listener.detach())

    def transfer(
        self, named_tensors: list[NamedTensor], workers: list[WorkerClient], version: str, failures: Failures
    ) -> None:
        """Broadcast to all workers; each loads a tensor while the next is on its way."""
        dtypes = [self.dtype or tensor.dtype for _, tensor in named_tensors]
        info = {
            "names": [name for name, _ in named_tensors],
            "dtype_names": [str(dtype).removeprefix("torch.") for dtype in dtypes],
            "shapes": [list(full_shape(tensor)) for _, tensor in named_tensors],
            "piece_bytes": self.bucket_bytes,
        }
        updates = {
            worker.url: run_in_background(
                partial(self.post, worker, "/update_weights", {"update_info": info})
            )
            for worker in workers
        }
        self.in_flight = []
        for tensors in gather_in_groups(named_tensors, self.gather_bytes):
            self.send(tensors, updates, failures)
        self.wait_for_sent(updates, failures)
        sent = [worker for worker in workers if worker.url not in failures]
        sent = call_each(sent, lambda worker: updates[worker.url].result(), failures)
        call_each(sent, lambda worker: self.finish(worker, version), failures)

    def send(self, tensors: list[Tensor], updates: dict[str, Future[JSON]], failures: Failures) -> None:
        """Send tensors to every worker that still takes part; keep none of them.

        The last piece may still be on its way, in a buffer, while the next tensors are gathered. Nobody waits
        for it: gloo sends it in a thread of its own.
        """
        for tensor in tensors:
            dtype = self.dtype or tensor.dtype
            for piece in split_pieces(tensor, dtype, self.bucket_bytes):
                staged = self.staging.fill(piece, dtype)
                self.wait_for_sent(updates, failures)
                self.broadcast(staged.wait(), updates, failures)
                if not staged.copied:
                    self.wait_for_sent(updates, failures)

    def broadcast(self, piece: Tensor, updates: dict[str, Future[JSON]], failures: Failures) -> None:
        """Begin to send one piece to all workers."""
        for url, update in updates.items():
            try:
                if url not in failures:
                    if update.done():
                        update.result()  # a worker that has given up says why
                    self.in_flight.append(
                        (url, self.groups[url][1].broadcast([piece], build_broadcast_options()))
                    )
            except (RuntimeError, EngineError) as error:
                failures[url] = error

    def wait_for_sent(self, updates: dict[str, Future[JSON]], failures: Failures) -> None:
        """Wait until the piece on its way has reached all workers."""
        in_flight, self.in_flight = self.in_flight, []
        for url, work in in_flight:
            try:
                work.wait()
            except RuntimeError as error:  # gloo: the connection is closed, or the time is over
                update = updates[url]
                failures[url] = (update.done() and update.exception()) or error  # type: ignore[assignment]

    def close(self) -> None:
        """Leave all groups."""
        super().close()
        self.groups.clear()
        self.staging.close()
        self.store = None


class Staging:
    """Two buffers in main memory, pinned for a GPU, so that its copies run beside the sending.

    Weights that are in main memory in the right type are sent without a copy.

    Args:
        num_bytes: Size of each buffer.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.buffers: list[Tensor] = []
        self.turn = 0

    def fill(self, piece: Tensor, dtype: torch.dtype) -> StagedPiece:
        """Begin to copy a flat piece into the buffer that was not filled last.

        The buffer's previous content must have been sent.
        """
        if not piece.is_cuda and piece.dtype == dtype:
            return StagedPiece(piece.view(torch.uint8))
        if not self.buffers:
            self.buffers = [self.allocate(piece.is_cuda) for _ in range(2)]
        self.turn = 1 - self.turn
        target = self.buffers[self.turn][: piece.numel() * dtype.itemsize]
        # The GPU converts the type, so that fewer bytes leave it.
        target.view(dtype).copy_(piece.to(dtype) if piece.is_cuda else piece, non_blocking=piece.is_cuda)
        event = torch.cuda.Event() if piece.is_cuda else None
        if event is not None:
            event.record()
        return StagedPiece(target, event, copied=True)

    def allocate(self, pinned: bool) -> Tensor:
        """Return a new buffer."""
        return torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=pinned)

    def close(self) -> None:
        """Free the buffers."""
        self.buffers = []


class StagedPiece:
    """Bytes in main memory, which may still be arriving.

    Args:
        data: The bytes.
        event: Completes when all bytes have arrived; None: they are there.
        copied: Whether they lie in a buffer, so that their source may be freed.
    """

    def __init__(self, data: Tensor, event: torch.cuda.Event | None = None, copied: bool = False) -> None:
        self.data = data
        self.event = event
        self.copied = copied

    def wait(self) -> Tensor:
        """Wait for the bytes and return them."""
        if self.event is not None:
            self.event.synchronize()
        return self.data


def split_pieces(tensor: Tensor, dtype: torch.dtype, piece_bytes: int) -> Iterator[Tensor]:
    """Cut a tensor into flat pieces of at most `piece_bytes` in a type, but of one number at least."""
    yield from tensor.detach().reshape(-1).split(max(1, piece_bytes // dtype.itemsize))


class DiskPush(WeightPush):
    """Write a folder of safetensors files, complete or absent, and let the workers load it.

    Args:
        bucket_mib: As in `WeightPush`; each bucket is a file.
        timeout_s: As in `WeightPush`.
        folder: Where the folders are written; every worker must see it under this path. None: in the run
            folder.
    """

    backend = "disk"

    def __init__(self, bucket_mib: int = 256, timeout_s: float = 300.0, folder: str | None = None) -> None:
        super().__init__(bucket_mib, timeout_s)
        self.own_folder = Path(folder) if folder else None
        self.folder = self.own_folder or Path("weights")

    def open(self, model: Any, folder: Path) -> None:
        """Write into the run folder, unless another was given."""
        self.folder = self.own_folder or folder

    def transfer(
        self, named_tensors: list[NamedTensor], workers: list[WorkerClient], version: str, failures: Failures
    ) -> None:
        """Write, rename, load; then delete the folder of the push before."""
        from safetensors.torch import save_file

        parent = self.folder.resolve()
        target, scratch = parent / version, parent / f"{version}.tmp"
        for stale in (target, scratch):
            shutil.rmtree(stale, ignore_errors=True)
        problem: OSError | None = None
        try:
            scratch.mkdir(parents=True)
            self.write_metadata(scratch)
        except OSError as error:
            problem = error
        names = iter(name for name, _ in named_tensors)
        for number, tensors in enumerate(gather_in_groups(named_tensors, self.gather_bytes)):
            bucket = {next(names): tensor.detach().cpu().contiguous() for tensor in tensors}
            try:
                if problem is None:
                    save_file(bucket, scratch / self.file_name(number))
            except OSError as error:
                problem = error  # keep gathering: the other ranks do
            bucket.clear()
        if problem is not None:
            raise EngineError(
                f"The weights must be written to {scratch}, but that failed ({problem}). Make room."
            )
        scratch.rename(target)
        call_each(workers, lambda worker: self.load(worker, target, version), failures)
        own = version.rpartition("-")[0] if self.own_folder else ""  # a given folder may serve several runs
        for other in parent.iterdir():
            if other != target and VERSION_FOLDER.fullmatch(other.name) and other.name.startswith(own):
                shutil.rmtree(other, ignore_errors=True)

    def write_metadata(self, folder: Path) -> None:
        """Write the files that belong beside the weights: none."""

    def file_name(self, number: int) -> str:
        """Return the name of a bucket's file."""
        return f"model-{number:05d}.safetensors"

    def load(self, worker: WorkerClient, folder: Path, version: str) -> None:
        """Let a worker load a folder."""
        self.start(worker)
        self.post(worker, "/update_weights", {"update_info": {"folder": str(folder)}})
        self.finish(worker, version)


class AdapterPush(DiskPush):
    """Write only a LoRA's matrices, as peft does, and let the workers load them beside the base's weights.

    There is far less to write and to load than merged weights, but sampling is slower, since each adapted
    layer multiplies twice more. Requests name the push that they want, so an older adapter never serves them.

    Args:
        timeout_s: As in `WeightPush`.
        folder: As in `DiskPush`.
    """

    backend = "adapter"
    takes_adapters = True

    def __init__(self, timeout_s: float = 300.0, folder: str | None = None) -> None:
        super().__init__(timeout_s=timeout_s, folder=folder)
        self.model: Any = None

    @property
    def gather_bytes(self) -> int:
        """Return no limit: the matrices are few, and peft wants one file."""
        return sys.maxsize

    def open(self, model: Any, folder: Path) -> None:
        """Require a model with an adapter."""
        super().open(model, folder)
        if not hasattr(model, "peft_config"):
            raise InputError(
                "AdapterPush needs a teacher with an adapter, but model.lora is not set. Set it, or push "
                "whole weights with GlooPush."
            )
        self.model = model

    def launch_options(self) -> tuple[list[str], dict[str, str]]:
        """Let workers take one adapter at a time, of our rank or the next that vLLM has."""
        rank = min((r for r in VLLM_RANKS if r >= self.model.peft_config[ADAPTER].r), default=VLLM_RANKS[-1])
        arguments = ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)]
        return arguments, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}

    def write_metadata(self, folder: Path) -> None:
        """Write the adapter's configuration."""
        save_adapter_config(self.model, str(self.model.name_or_path), folder)

    def file_name(self, number: int) -> str:
        """Return peft's name for the file of an adapter."""
        return ADAPTER_FILE

    def load(self, worker: WorkerClient, folder: Path, version: str) -> None:
        """Load the new adapter, announce its version, and drop the one before."""
        self.start(worker)
        self.finish(worker, version)  # before the adapter: vLLM forgets adapters when weights change
        adapter = {"lora_name": version, "lora_path": str(folder)}
        self.post(worker, "/v1/load_lora_adapter", adapter, in_words=True)
        former, worker.adapter = worker.adapter, version
        if former is not None:
            self.post(worker, "/v1/unload_lora_adapter", {"lora_name": former}, in_words=True)


def call_each(
    workers: list[WorkerClient], function: Callable[[WorkerClient], Any], failures: Failures
) -> list[WorkerClient]:
    """Call a function for every worker at once; note the failures and return the others."""
    calls = [(worker, run_in_background(partial(function, worker))) for worker in workers]
    done = []
    for worker, call in calls:
        try:
            call.result()
            done.append(worker)
        except (EngineError, RuntimeError) as error:  # RuntimeError: gloo's
            failures[worker.url] = error
    return done


def parse_dtype(name: str) -> torch.dtype:
    """Look a data type up by its name, such as bfloat16."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(
            f"A data type must be one of torch's, such as bfloat16, but is '{name}'. Correct it."
        )
    return dtype
