"""Push weights to vLLM workers from GPU to GPU, by vLLM's own trainer-side code.

    rank 0   prepare_all ═ gather ─▶ send ═ gather ─▶ send ═ ... ─▶ finish
    rank 1               ═ gather         ═ gather         ═ ...

Each ═ is a collective of the trainer's ranks. None stands between the first and the last part of a send: the
other ranks would wait in it for rank 0, which waits for the workers. Trainers that gathered while they sent
have hung (https://github.com/huggingface/trl/issues/7103).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar

import torch

from rlt_lightning.engines.base import EngineError, NamedTensor
from rlt_lightning.engines.client import JSON, WorkerClient, WorkerError
from rlt_lightning.engines.launch import find_free_port
from rlt_lightning.engines.push import (
    Failures,
    WeightPush,
    call_each,
    choose_narrower_dtype,
    find_common_dtype,
)
from rlt_lightning.engines.threads import run_in_background
from rlt_lightning.gloo import LOOPBACK
from rlt_lightning.models.weights import Deferred, gather_in_groups
from rlt_lightning.version import get_minor

T = TypeVar("T")


class NCCLPush(WeightPush):
    """Broadcast from GPU to GPU by vLLM's own trainer-side code, which the trainer's environment must hold.

    All workers form one group with the trainer, so one broadcast serves them all. The loss of one worker
    breaks the group: the push fails for all, and the next push forms a new group. A rank that dies within a
    broadcast makes NCCL wait; after `timeout_s` the run stops.

    Args:
        bucket_mib: Weights, in MiB, that all of the trainer's GPUs gather before they are sent. vLLM copies
            them into a buffer of this size, in the type in which they travel. A larger tensor is a bucket by
            itself.
        timeout_s: Deadline of forming the group, of sending one bucket, and of every call to a worker.
        host: Address of this machine that the workers can reach.
        port: Where they meet; 0: any free port.
    """

    backend = "nccl"

    def __init__(
        self, bucket_mib: int = 512, timeout_s: float = 300.0, host: str = LOOPBACK, port: int = 0
    ) -> None:
        super().__init__(bucket_mib, timeout_s)
        self.host = host
        self.port = port
        self.engine: Any = None
        self.members: list[tuple[str, int]] = []  # URL and incarnation of those in the group

    def prepare_all(self, workers: list[WorkerClient]) -> Failures:
        """Hold the workers' requests, and form one group with all of them unless it stands."""
        failures = super().prepare_all(workers)
        workers = self.prepared or []
        try:
            if workers:
                self.run_on_gpu(lambda: self.form_group(workers))
                self.engine.client.start_all()
        except TimeoutError as error:
            raise self.explain_timeout(workers) from error
        except (RuntimeError, EngineError) as error:
            self.fail_all(workers, error, failures)
            self.prepared = []
        return failures

    def prepare(self, worker: WorkerClient) -> None:
        """Hold the worker's requests, if this process can send at all."""
        if not torch.cuda.is_available() or find_spec("vllm") is None:
            raise WorkerError(
                "NCCLPush needs a GPU, and vLLM in the trainer's environment, but one of them is missing. "
                "Install the vllm extra, or use GlooPush.",
                retryable=False,
            )
        # vLLM 0.33 leaves out what it has sent before, which 0.32 would wait for.
        import vllm

        ours, theirs = vllm.__version__, worker.version
        if get_minor(ours) != get_minor(theirs):
            raise WorkerError(
                f"NCCLPush needs the worker's vLLM, {theirs}, in the trainer's environment, but that has "
                f"{ours}. Install the worker's, or use GlooPush.",
                retryable=False,
            )
        super().prepare(worker)

    def transfer(
        self, named_tensors: list[NamedTensor], workers: list[WorkerClient], version: str, failures: Failures
    ) -> None:
        """Let vLLM send bucket after bucket, each after all ranks have gathered it."""
        names = iter(name for name, _ in named_tensors)
        dtype = find_common_dtype(workers)
        error: Exception | None = None
        for tensors in gather_in_groups(named_tensors, self.gather_bytes):
            bucket = [(next(names), tensor) for tensor in tensors]
            try:
                if workers and error is None:
                    self.send(bucket, dtype)
            except (RuntimeError, EngineError, TimeoutError) as problem:
                error = problem  # keep gathering: the other ranks do
            bucket.clear()
        if isinstance(error, TimeoutError):
            raise self.explain_timeout(workers) from error
        if error is not None:
            self.fail_all(workers, error, failures)
            return
        call_each(workers, lambda worker: self.finish(worker, version), failures)

    def send(self, bucket: list[NamedTensor], dtype: torch.dtype | None) -> None:
        """Send whole tensors to all workers; return when they have loaded them.

        Args:
            bucket: Names and tensors.
            dtype: The type that all workers compute in; None: they differ.
        """
        torch.cuda.current_stream().synchronize()  # vLLM reads on streams of its own
        self.engine.source = build_source(bucket, dtype)
        self.run_on_gpu(self.engine.send_weights)

    def run_on_gpu(self, function: Callable[[], T]) -> T:
        """Run a function in a thread that can be left behind: NCCL cannot be cancelled.

        Raises:
            TimeoutError: If it does not end within `timeout_s`.
        """
        device = torch.cuda.current_device()

        def run() -> T:
            torch.cuda.set_device(device)  # each thread has its own
            return function()

        return run_in_background(run).result(self.timeout_s)

    def form_group(self, workers: list[WorkerClient]) -> None:
        """Form a group with these workers, unless it stands."""
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        members = [(worker.url, worker.incarnation) for worker in workers]
        if self.engine is not None and members == self.members:
            return
        self.leave_group()
        info = NCCLTrainerInitInfo(
            master_address=self.host,
            master_port=self.port or find_free_port(self.host),
            world_size=1 + sum(worker.num_ranks for worker in workers),
            packed_buffer_size_bytes=self.bucket_bytes,
            rank=0,
        )
        self.engine = WeightTransferTrainerFactory.trainer_init(
            info, client=SyncClient(self, workers), source=build_source([], None)
        )
        self.members = members

    def explain_timeout(self, workers: list[WorkerClient]) -> EngineError:
        """Return the error that ends the run: nobody knows how long NCCL would wait."""
        return EngineError(
            f"The NCCL push to {', '.join(w.url for w in workers)} must end within {self.timeout_s:g} s, "
            "but did not: a worker died, or the network is not the one that NCCL chose "
            "(NCCL_SOCKET_IFNAME). Look at the workers' logs, then resume with --resume true."
        )

    def fail_all(self, workers: list[WorkerClient], error: Exception, failures: Failures) -> None:
        """Leave the group, which an error has broken for all workers."""
        self.leave_group()
        failures.update({worker.url: error for worker in workers if worker.url not in failures})

    def leave_group(self) -> None:
        """Leave the group, if there is one."""
        if self.engine is not None:
            self.engine.shutdown()
        self.engine, self.members = None, []

    def close(self) -> None:
        """Leave the group."""
        super().close()
        self.leave_group()


class SyncClient:
    """The calls by which vLLM's trainer-side code drives workers, made to several servers at once.

    vLLM takes each bucket for an update of its own. They are parts of one, so that layers whose weights come
    in several buckets are loaded once: `NCCLPush` begins and ends it.
    """

    def __init__(self, push: WeightPush, workers: list[WorkerClient]) -> None:
        self.push = push
        self.workers = workers

    def init_weight_transfer_engine(self, init_info: JSON) -> None:
        """Give each server the ranks that follow those of the servers before it."""
        offsets = dict.fromkeys((worker.url for worker in self.workers), int(init_info["rank_offset"]))
        for before, worker in zip(self.workers, self.workers[1:], strict=False):
            offsets[worker.url] = offsets[before.url] + before.num_ranks

        def init(worker: WorkerClient) -> None:
            info = init_info | {"rank_offset": offsets[worker.url]}
            self.push.post(worker, "/init_weight_transfer_engine", {"init_info": info})

        self._call_all(init)

    def start_all(self) -> None:
        """Begin the update everywhere."""
        self._call_all(self.push.start)

    def start_weight_update(self) -> None:
        """Do nothing: the update that this bucket is a part of has begun."""

    def update_weights(self, update_info: Any) -> None:
        """Let all workers receive; return when they have."""
        self._call_all(lambda w: self.push.post(w, "/update_weights", {"update_info": update_info}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing: more buckets may follow."""

    def _call_all(self, function: Callable[[WorkerClient], Any]) -> None:
        failures: Failures = {}
        call_each(self.workers, function, failures)
        if failures:
            raise EngineError("; ".join(map(str, failures.values())))


def build_source(bucket: list[NamedTensor], dtype: torch.dtype | None) -> Any:
    """Return a bucket of whole tensors as vLLM's trainer-side code reads it; see `WeightSource`."""
    from vllm.distributed.weight_transfer.base import ModuleSource

    return ModuleSource(WeightSource(bucket, dtype))


class WeightSource:
    """Whole tensors that vLLM's ModuleSource reads like a module's parameters.

    Args:
        bucket: Names and tensors.
        dtype: The type that all workers compute in, in which wider weights travel; None: they differ.
    """

    def __init__(self, bucket: list[NamedTensor], dtype: torch.dtype | None = None) -> None:
        self.bucket = bucket
        self.dtype = dtype

    def named_parameters(self) -> Iterator[tuple[str, Deferred]]:
        """Yield names with objects whose `full_tensor()` is what is sent: it is converted one by one."""
        for name, tensor in self.bucket:
            dtype = choose_narrower_dtype(tensor.dtype, self.dtype)
            yield name, Deferred(tensor.shape, dtype, partial(tensor.detach().to, dtype))
