"""The part that runs inside vLLM's worker processes: it takes new weights.

The trainer never imports this file, and it needs none of our dependencies. Install this package without them
into the environment that has vLLM (`pip install --no-deps`), then

    vllm serve MODEL --worker-extension-cls rlt_lightning.vllm_worker.WorkerExtension \
        --weight-transfer-config '{"backend": "rlt_ipc"}'

vLLM calls it through its weight-transfer routes: init, start, update, finish (docs/rollouts.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from queue import Full, Queue
from threading import Event
from typing import Any

import torch
import vllm
from torch.distributed import PrefixStore, TCPStore
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rlt_lightning.gloo import build_broadcast_options, join_group
from rlt_lightning.ipc import JSON, NamedTensor, SharedReader
from rlt_lightning.version import VLLM_MINORS, get_minor

if get_minor(vllm.__version__) not in VLLM_MINORS:
    raise ImportError(
        f"rlt_lightning.vllm_worker must run in vLLM {' or '.join(VLLM_MINORS)}, but this is "
        f"{vllm.__version__}. Install one of these."
    )

# Tensors that are received before they are loaded.
AHEAD = 8


class ReloadEngine(WeightTransferEngine):
    """Base of most backends: vLLM's reload, layer by layer, and a repair of what it misses."""

    supports_draft_weight_update = False
    helper: ThreadPoolExecutor | None = None  # one thread, which may use any core

    def open_helper(self) -> ThreadPoolExecutor:
        """Start a helper thread; forget an earlier one, which a trainer may have left waiting."""
        self.helper = ThreadPoolExecutor(1, initializer=use_any_core)
        return self.helper

    def load_ahead(self, named_tensors: Iterator[NamedTensor]) -> None:
        """Load tensors into the model while the helper gets the next ones."""
        arrivals: Queue[NamedTensor | Exception | None] = Queue(AHEAD)
        loading = Event()
        loading.set()

        def put(item: NamedTensor | Exception | None) -> None:
            while loading.is_set():  # when loading fails, what still arrives is thrown away
                try:
                    return arrivals.put(item, timeout=1)
                except Full:
                    continue

        def get_all() -> None:
            try:
                for item in named_tensors:
                    put(item)
                put(None)
            except Exception as error:  # to be raised where it is waited for
                put(error)

        def arrived() -> Iterator[NamedTensor]:
            while (item := arrivals.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item

        (self.helper or self.open_helper()).submit(get_all)
        try:
            self.model.load_weights(arrived())
        finally:
            loading.clear()

    def start_weight_update(self) -> None:
        """Make the model ready to take a checkpoint's tensors, in any order."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Put what was loaded in place."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_heads(self.model)

    def shutdown(self) -> None:
        """Do nothing: nothing is held between two updates."""


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Rebuild the packed copy of an output head that shares the embedding's weights (vLLM on CPU only).

    A checkpoint has no tensor for a tied head, so a reload never reaches it and it keeps the packed copy made
    at start: log-probs are off by 0.9 nats, while greedy text may even agree.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where this server's workers meet the trainer, which is rank 0 of their group."""

    host: str
    port: int
    prefix: str  # a new one for every meeting
    world_size: int  # workers and the trainer
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """The tensors that follow, each cut into pieces of `piece_bytes` at most."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    piece_bytes: int


class GlooEngine(ReloadEngine):
    """Weights broadcast by the trainer over TCP: CPU workers, or GPUs without NCCL between them."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    group: Any = None  # a ProcessGroupGloo

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the trainer's group, in place of an earlier one."""
        config = self.parallel_config
        rank = 1 + config.data_parallel_index * config.world_size + config.rank
        timeout = timedelta(seconds=init_info.timeout_s)

        def join() -> Any:
            server = TCPStore(init_info.host, init_info.port, None, False, timeout)
            store = PrefixStore(init_info.prefix, server)
            return join_group(store, rank, init_info.world_size, init_info.timeout_s, init_info.host)

        self.group = self.open_helper().submit(join).result()  # gloo's own threads take its cores

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Load each tensor as soon as it is here, while the next ones are on their way."""
        if self.group is None:
            raise RuntimeError("init_weight_transfer_engine must come before update_weights. Call it.")
        self.load_ahead(receive_tensors(self.group, update_info))

    def shutdown(self) -> None:
        """Leave the group."""
        self.group = None


def use_any_core() -> None:
    """Let this thread use all cores: vLLM pins a CPU worker's threads, and this one would share a core."""
    if hasattr(os, "sched_setaffinity"):  # Linux
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def receive_tensors(group: Any, info: GlooUpdateInfo) -> Iterator[NamedTensor]:
    """Receive tensor after tensor from the trainer."""
    for name, shape, dtype in zip(info.names, info.shapes, info.dtype_names, strict=True):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        for piece in tensor.view(-1).view(torch.uint8).split(info.piece_bytes):
            group.broadcast([piece], build_broadcast_options()).wait()
        yield name, tensor


@dataclass
class IPCInitInfo(WeightTransferInitInfo):
    """No information is needed: every update names its buffer."""


@dataclass
class IPCUpdateInfo(WeightTransferUpdateInfo):
    """What lies in the trainer's buffer; see `SharedReader.read`."""

    buffer: JSON
    parts: list[JSON]


class IPCEngine(ReloadEngine):
    """Weights in memory that the trainer on this machine shares."""

    init_info_cls = IPCInitInfo
    update_info_cls = IPCUpdateInfo
    reader: SharedReader | None = None

    def init_transfer_engine(self, init_info: IPCInitInfo) -> None:
        """Do nothing: nothing to set up."""

    def receive_weights(self, update_info: IPCUpdateInfo) -> None:
        """Load what lies in the buffer; afterwards the trainer fills it again."""
        self.reader = self.reader or SharedReader(self.device)
        self.model.load_weights(self.reader.read(update_info.buffer, update_info.parts))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def finish_weight_update(self) -> None:
        """Put what was loaded in place, and let go of the buffer."""
        super().finish_weight_update()
        self.shutdown()

    def shutdown(self) -> None:
        """Let go of the buffer."""
        self.reader = None


@dataclass
class AdapterInfo(WeightTransferInitInfo, WeightTransferUpdateInfo):
    """No information is needed."""


class AdapterEngine(WeightTransferEngine):
    """Changes no weights: an adapter comes by vLLM's own route, and its version by ours."""

    init_info_cls = AdapterInfo
    update_info_cls = AdapterInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: AdapterInfo) -> None:
        """Do nothing: nothing to set up."""

    def start_weight_update(self) -> None:
        """Do nothing: nothing to make ready."""

    def receive_weights(self, update_info: AdapterInfo) -> None:
        """Do nothing: nothing comes."""

    def finish_weight_update(self) -> None:
        """Do nothing: nothing was loaded."""

    def shutdown(self) -> None:
        """Do nothing: nothing is held."""


class WorkerExtension:
    """Mixed into vLLM's worker class; naming it on the command line is what loads this module there."""

    def describe_worker(self) -> dict[str, Any]:
        """Return the data type of the weights, and whether sleep works, which on a CPU frees nothing."""
        from vllm.platforms import current_platform

        config = self.model_config  # type: ignore[attr-defined]
        return {
            "dtype": str(config.dtype),
            "can_sleep": config.enable_sleep_mode or current_platform.is_cpu(),
        }

    def abandon_weight_update(self) -> None:
        """Forget an update that its trainer did not finish, so that another may start, of any backend.

        It left layers half loaded, and vLLM would count their old tensors as new ones.
        """
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        self._weight_update_active = False
        for layer in self.get_model().modules():  # type: ignore[attr-defined]
            info = get_layerwise_info(layer)
            if info.can_load():
                info.load_numel, info.loaded_weights = 0, []

    def name_gpu(self) -> str:
        """Return the UUID of this process's GPU; empty if it has none."""
        device = self.device  # type: ignore[attr-defined]
        return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


for backend, engine in {"rlt_ipc": IPCEngine, "gloo": GlooEngine, "adapter": AdapterEngine}.items():
    if backend not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(backend, engine)
