"""The way of new weights into vLLM workers: broadcast over gloo, a folder, or NCCL."""

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
from importlib.util import find_spec
from pathlib import Path
from threading import Lock, Thread
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from rlt_lightning.engines.base import EngineError, NamedTensor
from rlt_lightning.engines.client import JSON, WorkerClient, WorkerError
from rlt_lightning.gloo import LOOPBACK, from_trainer, join_group
from rlt_lightning.lora import ADAPTER, ADAPTER_FILE, save_adapter_config
from rlt_lightning.sharding import full_shape, gathered, gathered_groups
from rlt_lightning.types import InputError

T = TypeVar("T")
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes
VERSION_FOLDER = re.compile(r"[0-9a-f]{8}-\d{6}(\.tmp)?")  # as VLLMEngine names versions
Failures = dict[str, Exception]  # URL of a worker -> what went wrong there


class WeightPush(ABC):
    """Bring the trainer's weights into vLLM workers while they hold their requests.

    For each worker: pause, start, transfer, finish with the new version, reset the prefix cache, resume. A
    worker that fails on the way is left out of the rest; its weights are then undefined until the next push.

    Args:
        bucket_mib: Most of the weights, in MiB, that the trainer holds a second time: gathered from its
            ranks, or on their way. A tensor larger than that is a bucket of its own where it must be whole.
        timeout_s: Deadline of every single transfer and of every call to a worker.
    """

    backend: ClassVar[str]  # what the worker's --weight-transfer-config names
    takes_adapters: ClassVar[bool] = False  # whether it pushes a LoRA's matrices rather than merged weights

    def __init__(self, bucket_mib: int = 256, timeout_s: float = 300.0) -> None:
        if bucket_mib < 1 or timeout_s <= 0:
            raise InputError(
                f"A weight push needs bucket_mib >= 1 and timeout_s > 0, but got {bucket_mib} and "
                f"{timeout_s}."
            )
        self.bucket_bytes = bucket_mib * 2**20
        self.timeout_s = timeout_s

    def open(self, model: Any, folder: Path) -> None:  # noqa: B027  (most backends need neither)
        """Get ready, before workers are started.

        Args:
            model: The trainer's teacher.
            folder: In the run folder, for backends that write.
        """

    def launch_options(self) -> tuple[list[str], dict[str, str]]:
        """Further arguments and environment variables that workers must be started with."""
        return [], {}

    @property
    def gather_bytes(self) -> int:
        """Weights that are gathered from the trainer's ranks at once, in bytes; every rank does the same."""
        return self.bucket_bytes

    def push(self, named_tensors: list[NamedTensor], workers: list[WorkerClient], version: str) -> Failures:
        """Push to all workers at once and return those that failed, with the reason.

        Every tensor is gathered exactly once, whatever fails: other ranks of the trainer take part in that.
        """
        failures: Failures = {}
        workers = on_each(workers, self.prepare, failures)
        self.transfer(named_tensors, workers, version, failures)
        on_each([worker for worker in workers if worker.url not in failures], self.conclude, failures)
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

    def close(self) -> None:  # noqa: B027  (most backends hold nothing)
        """Free what is held between pushes."""


class GlooPush(WeightPush):
    """Broadcast tensor after tensor over TCP; each server's workers meet the trainer in a group of their own.

    Args:
        bucket_mib: As in `WeightPush`; longer tensors go in pieces of this size.
        timeout_s: As in `WeightPush`.
        host: Address of this machine that the workers can reach.
        dtype: In which the weights travel, such as bfloat16; None: as the trainer holds them.
    """

    backend = "gloo"

    def __init__(
        self, bucket_mib: int = 64, timeout_s: float = 300.0, host: str = LOOPBACK, dtype: str | None = None
    ) -> None:
        super().__init__(bucket_mib, timeout_s)
        self.host = host
        self.dtype = None if dtype is None else dtype_named(dtype)
        self.store: TCPStore | None = None
        self.lock = Lock()
        self.groups: dict[str, tuple[int, Any]] = {}  # URL -> incarnation that joined, group

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
        joined = in_background(lambda: self.post(worker, "/init_weight_transfer_engine", body))
        store = PrefixStore(prefix, self.store)
        group = in_background(lambda: join_group(store, 0, world_size, self.timeout_s, self.host))
        meeting: list[Future[Any]] = [joined, group]
        wait(meeting, return_when=FIRST_COMPLETED)
        if joined.done():
            joined.result()  # a worker that refuses says why; the group would be waited for in vain
        result = group.result()
        joined.result()
        return result

    def open_store(self) -> TCPStore:
        """Listen on our address alone; a TCPStore left to itself listens everywhere."""
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
            worker.url: in_background(partial(self.post, worker, "/update_weights", {"update_info": info}))
            for worker in workers
        }
        for tensors in gathered_groups(named_tensors, self.gather_bytes):
            self.send(tensors, updates, failures)
        sent = [worker for worker in workers if worker.url not in failures]
        sent = on_each(sent, lambda worker: updates[worker.url].result(), failures)
        on_each(sent, lambda worker: self.finish(worker, version), failures)

    def send(self, tensors: list[Tensor], updates: dict[str, Future[JSON]], failures: Failures) -> None:
        """Send tensors to every worker that still takes part; keeps none of them."""
        for tensor in tensors:
            for piece in pieces(tensor, self.dtype or tensor.dtype, self.bucket_bytes):
                self.broadcast(piece, updates, failures)

    def broadcast(self, piece: Tensor, updates: dict[str, Future[JSON]], failures: Failures) -> None:
        """Send one piece to all workers at the same time."""
        started = []
        for url, update in updates.items():
            try:
                if url not in failures:
                    if update.done():
                        update.result()  # a worker that has given up says why
                    started.append((url, self.groups[url][1].broadcast([piece], from_trainer())))
            except (RuntimeError, EngineError) as error:
                failures[url] = error
        for url, work in started:
            try:
                work.wait()
            except RuntimeError as error:  # gloo: the connection is closed, or the time is over
                update = updates[url]
                failures[url] = (update.done() and update.exception()) or error  # type: ignore[assignment]

    def close(self) -> None:
        """Leave all groups."""
        self.groups.clear()
        self.store = None


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
            self.describe(scratch)
        except OSError as error:
            problem = error
        names = iter(name for name, _ in named_tensors)
        for number, tensors in enumerate(gathered_groups(named_tensors, self.gather_bytes)):
            bucket = {next(names): tensor.detach().cpu().contiguous() for tensor in tensors}
            try:
                if problem is None:
                    save_file(bucket, scratch / self.file_name(number))
            except OSError as error:
                problem = error  # go on gathering: the other ranks do
            bucket.clear()
        if problem is not None:
            raise EngineError(
                f"The weights must be written to {scratch}, but that failed ({problem}). Make room."
            )
        scratch.rename(target)
        on_each(workers, lambda worker: self.load(worker, target, version), failures)
        own = version.rpartition("-")[0] if self.own_folder else ""  # a given folder may serve several runs
        for other in parent.iterdir():
            if other != target and VERSION_FOLDER.fullmatch(other.name) and other.name.startswith(own):
                shutil.rmtree(other, ignore_errors=True)

    def describe(self, folder: Path) -> None:
        """Write what belongs beside the weights: nothing."""

    def file_name(self, number: int) -> str:
        """Of a bucket."""
        return f"model-{number:05d}.safetensors"

    def load(self, worker: WorkerClient, folder: Path, version: str) -> None:
        """Let a worker load a folder."""
        self.start(worker)
        self.post(worker, "/update_weights", {"update_info": {"folder": str(folder)}})
        self.finish(worker, version)


class AdapterPush(DiskPush):
    """Write a LoRA's matrices alone, as peft does, and let the workers load them beside the base's weights.

    Far less to write and to load than merged weights; sampling is slower, since each adapted layer multiplies
    twice more. Every push has a name of its own that requests ask for, so none is served with an older one.

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
        """All at once: they are few, and peft wants one file."""
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

    def describe(self, folder: Path) -> None:
        """Write the adapter's configuration."""
        save_adapter_config(self.model, str(self.model.name_or_path), folder)

    def file_name(self, number: int) -> str:
        """As peft calls the only one."""
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


class NCCLPush(WeightPush):
    """Broadcast from GPU to GPU by vLLM's own trainer-side code, which the trainer's environment must hold.

    All workers form one group with the trainer, so one gather and one broadcast serve them all, and the loss
    of one breaks the group: the push fails for all and they meet anew at the next. A rank that dies within a
    broadcast makes NCCL wait; after `timeout_s` the run stops.

    Args:
        bucket_mib: Size of each of the two buffers that NCCL sends from.
        timeout_s: As in `WeightPush`.
        host: Address of this machine that the workers can reach.
        port: Where they meet; 0: any free port.
    """

    backend = "nccl"

    def __init__(
        self, bucket_mib: int = 512, timeout_s: float = 600.0, host: str = LOOPBACK, port: int = 0
    ) -> None:
        super().__init__(bucket_mib, timeout_s)
        self.host = host
        self.port = port
        self.engine: Any = None
        self.members: list[tuple[str, int]] = []  # URL and incarnation of those in the group

    @property
    def gather_bytes(self) -> int:
        """One tensor at a time: that is how vLLM's code asks for them."""
        return 0

    def prepare(self, worker: WorkerClient) -> None:
        """Hold the worker's requests, if this process can send at all."""
        if not torch.cuda.is_available() or find_spec("vllm") is None:
            raise WorkerError(
                "NCCLPush needs a GPU, and vLLM in the trainer's environment, but one of them is missing. "
                "Install the vllm extra, or use GlooPush.",
                retryable=False,
            )
        super().prepare(worker)

    def transfer(
        self, named_tensors: list[NamedTensor], workers: list[WorkerClient], version: str, failures: Failures
    ) -> None:
        """Let vLLM send, in a thread that can be left behind."""
        if not workers:
            for _ in gathered_groups(named_tensors, self.gather_bytes):
                pass  # the other ranks gather
            return
        device = torch.cuda.current_device()

        def send() -> None:
            torch.cuda.set_device(device)  # is a property of the thread
            self.group_of(named_tensors, workers, version).send_weights()

        try:
            in_background(send).result(self.timeout_s)
        except TimeoutError as error:
            raise EngineError(
                f"The NCCL push to {', '.join(w.url for w in workers)} must end within {self.timeout_s:g} s, "
                "but did not: a worker died, or the network is not the one that NCCL chose "
                "(NCCL_SOCKET_IFNAME). Look at the workers' logs, then go on with --ckpt_path last."
            ) from error
        except (RuntimeError, EngineError) as error:
            self.close()
            failures.update({worker.url: error for worker in workers})

    def group_of(self, named_tensors: list[NamedTensor], workers: list[WorkerClient], version: str) -> Any:
        """The group of these workers, formed anew if one has changed."""
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        members = [(worker.url, worker.incarnation) for worker in workers]
        if self.engine is None or members != self.members:
            self.close()
            info = NCCLTrainerInitInfo(
                master_address=self.host,
                master_port=self.port or free_port(self.host),
                world_size=1 + sum(worker.num_ranks for worker in workers),
                packed_buffer_size_bytes=self.bucket_bytes,
                rank=0,
            )
            self.engine = WeightTransferTrainerFactory.trainer_init(
                info, client=SyncClient(self, workers), source=ModuleSource(WholeTensors(named_tensors))
            )
            self.members = members
        self.engine.client.version = version
        return self.engine

    def close(self) -> None:
        """Leave the group."""
        if self.engine is not None:
            self.engine.shutdown()
        self.engine, self.members = None, []


class SyncClient:
    """The four calls by which vLLM's trainer-side code drives workers, made to several servers at once."""

    def __init__(self, push: WeightPush, workers: list[WorkerClient]) -> None:
        self.push = push
        self.workers = workers
        self.version = ""

    def init_weight_transfer_engine(self, init_info: JSON) -> None:
        """Give each server the ranks that follow those of the servers before it."""
        offsets = dict.fromkeys((worker.url for worker in self.workers), int(init_info["rank_offset"]))
        for before, worker in zip(self.workers, self.workers[1:], strict=False):
            offsets[worker.url] = offsets[before.url] + before.num_ranks

        def init(worker: WorkerClient) -> None:
            info = init_info | {"rank_offset": offsets[worker.url]}
            self.push.post(worker, "/init_weight_transfer_engine", {"init_info": info})

        self._on_all(init)

    def start_weight_update(self) -> None:
        """Begin the update everywhere."""
        self._on_all(self.push.start)

    def update_weights(self, update_info: Any) -> None:
        """Receive everywhere; returns when all have."""
        self._on_all(lambda w: self.push.post(w, "/update_weights", {"update_info": update_info}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update everywhere, with the version that is being pushed."""
        self._on_all(lambda worker: self.push.finish(worker, self.version))

    def _on_all(self, function: Callable[[WorkerClient], Any]) -> None:
        failures: Failures = {}
        on_each(self.workers, function, failures)
        if failures:
            raise EngineError("; ".join(map(str, failures.values())))


class WholeTensors:
    """Looks like a module to vLLM's ModuleSource, and gathers a partitioned tensor when it is asked for."""

    def __init__(self, named_tensors: list[NamedTensor]) -> None:
        self.named_tensors = named_tensors

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Names with tensors, or with what becomes one by `full_tensor()`."""
        for name, tensor in self.named_tensors:
            yield name, Partitioned(tensor) if hasattr(tensor, "ds_id") else tensor


class Partitioned:
    """A tensor under DeepSpeed ZeRO-3."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.dtype = tensor.dtype
        self.shape = full_shape(tensor)

    def full_tensor(self) -> Tensor:
        """Gather it from all ranks, to be freed when the caller drops it."""
        with gathered([self.tensor]) as [tensor]:
            return tensor.detach().clone()


def pieces(tensor: Tensor, dtype: torch.dtype, piece_bytes: int) -> Iterator[Tensor]:
    """Cut a tensor into byte tensors in main memory, without a copy where it lies there in that type."""
    flat = tensor.detach().reshape(-1)
    for piece in flat.split(max(1, piece_bytes // dtype.itemsize)):
        yield piece.to("cpu", dtype).view(torch.uint8)


def on_each(
    workers: list[WorkerClient], function: Callable[[WorkerClient], Any], failures: Failures
) -> list[WorkerClient]:
    """Call a function for every worker at once; note the failures and return the others."""
    calls = [(worker, in_background(partial(function, worker))) for worker in workers]
    done = []
    for worker, call in calls:
        try:
            call.result()
            done.append(worker)
        except (EngineError, RuntimeError) as error:  # RuntimeError: gloo's
            failures[worker.url] = error
    return done


def in_background(function: Callable[[], T]) -> Future[T]:
    """Run a function in a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # handed on to whoever asks for the result
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def free_port(host: str = LOOPBACK) -> int:
    """A port that nobody listens on."""
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def dtype_named(name: str) -> torch.dtype:
    """Look a data type up by its name, such as bfloat16."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(
            f"A data type must be one of torch's, such as bfloat16, but is '{name}'. Correct it."
        )
    return dtype
