"""Weights into vLLM workers from GPU to GPU, by vLLM's own trainer-side code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rlt_lightning.engines.base import EngineError, NamedTensor
from rlt_lightning.engines.client import JSON, WorkerClient, WorkerError
from rlt_lightning.engines.launch import find_free_port
from rlt_lightning.engines.push import (
    Failures,
    WeightPush,
    call_each,
    parse_dtype,
)
from rlt_lightning.engines.threads import run_in_background
from rlt_lightning.gloo import LOOPBACK
from rlt_lightning.models.weights import Deferred, full_shape, gather_in_groups, whole_tensors


class NCCLPush(WeightPush):
    """Broadcast from GPU to GPU by vLLM's own trainer-side code, which the trainer's environment must hold.

    All workers form one group with the trainer, so one gather and one broadcast serve them all. The loss of
    one worker breaks the group: the push fails for all, and the next push forms a new group. A rank that dies
    within a broadcast makes NCCL wait; after `timeout_s` the run stops. Weights travel in the workers' type
    if it is narrower than the trainer's.

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
        """Return 0, one tensor at a time: so vLLM's code asks for them."""
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
            for _ in gather_in_groups(named_tensors, self.gather_bytes):
                pass  # the other ranks gather
            return
        device = torch.cuda.current_device()

        def send() -> None:
            torch.cuda.set_device(device)  # each thread has its own
            self.form_group(named_tensors, workers, version).send_weights()

        try:
            run_in_background(send).result(self.timeout_s)
        except TimeoutError as error:
            raise EngineError(
                f"The NCCL push to {', '.join(w.url for w in workers)} must end within {self.timeout_s:g} s, "
                "but did not: a worker died, or the network is not the one that NCCL chose "
                "(NCCL_SOCKET_IFNAME). Look at the workers' logs, then resume with --resume true."
            ) from error
        except (RuntimeError, EngineError) as error:
            self.close()
            failures.update({worker.url: error for worker in workers})

    def form_group(self, named_tensors: list[NamedTensor], workers: list[WorkerClient], version: str) -> Any:
        """Return the group of these workers; form a new one if a worker has changed."""
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        source = ModuleSource(WeightSource(named_tensors, find_common_dtype(workers)))
        members = [(worker.url, worker.incarnation) for worker in workers]
        if self.engine is None or members != self.members:
            self.close()
            info = NCCLTrainerInitInfo(
                master_address=self.host,
                master_port=self.port or find_free_port(self.host),
                world_size=1 + sum(worker.num_ranks for worker in workers),
                packed_buffer_size_bytes=self.bucket_bytes,
                rank=0,
            )
            self.engine = WeightTransferTrainerFactory.trainer_init(
                info, client=SyncClient(self, workers), source=source
            )
            self.members = members
        self.engine.client.version = version
        self.engine.source = source
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

        self._call_all(init)

    def start_weight_update(self) -> None:
        """Begin the update everywhere."""
        self._call_all(self.push.start)

    def update_weights(self, update_info: Any) -> None:
        """Let all workers receive; return when they have."""
        self._call_all(lambda w: self.push.post(w, "/update_weights", {"update_info": update_info}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update everywhere, with the version that is being pushed."""
        self._call_all(lambda worker: self.push.finish(worker, self.version))

    def _call_all(self, function: Callable[[WorkerClient], Any]) -> None:
        failures: Failures = {}
        call_each(self.workers, function, failures)
        if failures:
            raise EngineError("; ".join(map(str, failures.values())))


class WeightSource:
    """Weights that vLLM's ModuleSource reads like a module's; a sharded tensor is gathered when it is read.

    Args:
        named_tensors: The trainer's weights, which may be sharded.
        dtype: The type that all workers compute in, in which wider weights travel; None: they differ.
    """

    def __init__(self, named_tensors: list[NamedTensor], dtype: torch.dtype | None = None) -> None:
        self.named_tensors = named_tensors
        self.dtype = dtype

    def named_parameters(self) -> Iterator[tuple[str, Deferred]]:
        """Yield names with objects whose `full_tensor()` is what is sent."""
        for name, tensor in self.named_tensors:
            yield name, defer_cast(tensor, choose_narrower_dtype(tensor.dtype, self.dtype))


def defer_cast(tensor: Any, dtype: torch.dtype) -> Deferred:
    """Return a placeholder for a tensor in another type, to be gathered from all ranks when it is read."""

    def gather() -> Tensor:
        with whole_tensors([tensor]) as [whole]:
            sent = whole.detach().to(dtype)
            # DeepSpeed frees what it has gathered.
            return sent.clone() if hasattr(tensor, "ds_id") and sent.dtype == whole.dtype else sent

    return Deferred(torch.Size(full_shape(tensor)), dtype, gather)


def choose_narrower_dtype(ours: torch.dtype, theirs: torch.dtype | None) -> torch.dtype:
    """Return the worker's type if it has fewer bytes: the worker would round to it anyway."""
    if theirs is None or not ours.is_floating_point or theirs.itemsize >= ours.itemsize:
        return ours
    return theirs


def find_common_dtype(workers: list[WorkerClient]) -> torch.dtype | None:
    """Return the type that all workers compute in; None if they differ."""
    names = {worker.dtype for worker in workers}
    return parse_dtype(names.pop()) if len(names) == 1 else None
