"""How new weights get into vLLM workers; the default: broadcast over gloo."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from rlt_lightning.engines.base import EngineError, NamedTensor
from rlt_lightning.engines.client import JSON, WorkerClient, WorkerError
from rlt_lightning.engines.staging import Staging, pieces
from rlt_lightning.gloo import LOOPBACK, from_trainer, join_group
from rlt_lightning.models.weights import full_shape, gather_in_groups
from rlt_lightning.types import InputError

T = TypeVar("T")
Failures = dict[str, Exception]  # URL of a worker -> what went wrong there


class WeightPush(ABC):
    """Bring the trainer's weights into vLLM workers while they hold their requests.

    For each worker: pause, start, transfer, finish with the new version, reset the prefix cache, resume. A
    worker that fails on the way is left out of the rest; its weights are then undefined until the next push.

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
        self.dtype = None if dtype is None else dtype_named(dtype)
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
            worker.url: in_background(partial(self.post, worker, "/update_weights", {"update_info": info}))
            for worker in workers
        }
        self.in_flight = []
        for tensors in gather_in_groups(named_tensors, self.gather_bytes):
            self.send(tensors, updates, failures)
        self.wait_for_sent(updates, failures)
        sent = [worker for worker in workers if worker.url not in failures]
        sent = on_each(sent, lambda worker: updates[worker.url].result(), failures)
        on_each(sent, lambda worker: self.finish(worker, version), failures)

    def send(self, tensors: list[Tensor], updates: dict[str, Future[JSON]], failures: Failures) -> None:
        """Send tensors to every worker that still takes part; keep none of them.

        The last piece may still be on its way, in a buffer, while the next tensors are gathered.
        """
        for tensor in tensors:
            dtype = self.dtype or tensor.dtype
            for piece in pieces(tensor, dtype, self.bucket_bytes):
                staged = self.staging.fill(piece, dtype)
                self.wait_for_sent(updates, failures)
                self.broadcast(staged.arrived(), updates, failures)
                if not staged.copied:
                    self.wait_for_sent(updates, failures)

    def broadcast(self, piece: Tensor, updates: dict[str, Future[JSON]], failures: Failures) -> None:
        """Begin to send one piece to all workers."""
        for url, update in updates.items():
            try:
                if url not in failures:
                    if update.done():
                        update.result()  # a worker that has given up says why
                    self.in_flight.append((url, self.groups[url][1].broadcast([piece], from_trainer())))
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
        self.groups.clear()
        self.staging.close()
        self.store = None


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


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also in a notebook, which has a running loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    return in_background(lambda: asyncio.run(work)).result()


def iterate_in_thread(items: AsyncIterator[T]) -> Iterator[T]:
    """Yield what an async iterator yields. It runs in a thread, also while the caller is busy."""
    arrived: SimpleQueue[T | None] = SimpleQueue()  # None: no more come
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = Future()

    async def forward() -> None:
        task = asyncio.current_task()
        assert task is not None
        begun.set_result((asyncio.get_running_loop(), task))
        async for item in items:
            arrived.put(item)

    thread = in_background(lambda: asyncio.run(forward()))
    thread.add_done_callback(lambda _: arrived.put(None))
    try:
        while (item := arrived.get()) is not None:
            yield item
        thread.result()
    finally:
        if not thread.done():  # the caller wants no more
            loop, task = begun.result()
            with contextlib.suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(task.cancel)
            wait([thread])


def free_port(host: str = LOOPBACK) -> int:
    """Return a port that nobody listens on."""
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
