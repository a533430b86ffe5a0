"""The part that runs inside vLLM's worker processes: it takes new weights.

The trainer never imports this file, and it needs none of our dependencies. Install this package without them
into the environment that has vLLM (`pip install --no-deps`), then

    vllm serve MODEL --worker-extension-cls rlt_lightning.worker.vllm.WorkerExtension \
        --weight-transfer-config '{"backend": "rlt"}'

vLLM calls it through its weight-transfer routes: init, start, update, finish (docs/rollouts.md).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import vllm
from torch.distributed import PrefixStore, TCPStore
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from rlt_lightning.worker import VLLM_MINORS, get_minor
from rlt_lightning.worker.gloo import build_broadcast_options, join_group
from rlt_lightning.worker.ipc import JSON, TensorReader, open_buffer

if get_minor(vllm.__version__) not in VLLM_MINORS:
    raise ImportError(
        f"rlt_lightning.worker.vllm must run in vLLM {' or '.join(VLLM_MINORS)}, but this is "
        f"{vllm.__version__}. Install one of these."
    )


@dataclass
class MeetingInfo(WeightTransferInitInfo):
    """Where this server's model workers meet the trainer, which is rank 0 of their group, for a GlooPush."""

    host: str
    port: int
    prefix: str  # a new one for every meeting
    world_size: int  # model workers of all servers, and the trainer
    rank_offset: int  # of this server's first model worker
    timeout_s: float


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """A part of the weights."""

    parts: list[JSON]  # see `TensorReader.read`
    buffer: JSON | None = None  # where the trainer shares it; None: it is broadcast
    num_bytes: int = 0  # of what is broadcast


class BucketEngine(IPCWeightTransferEngine):
    """Weights bucket by bucket; vLLM's engine starts and ends the reload, and we repair what it misses."""

    init_info_cls = MeetingInfo
    update_info_cls = BucketInfo
    supports_draft_weight_update = False
    group: Any = None  # a ProcessGroupGloo
    reader: TensorReader | None = None
    shared: tuple[JSON | None, Any] = None, None  # the buffer that is open

    def init_transfer_engine(self, init_info: MeetingInfo) -> None:
        """Join the trainer's group, in place of an earlier one."""
        config = self.parallel_config
        rank = init_info.rank_offset + config.data_parallel_index * config.world_size + config.rank
        timeout = timedelta(seconds=init_info.timeout_s)
        server = TCPStore(init_info.host, init_info.port, None, False, timeout)
        store = PrefixStore(init_info.prefix, server)
        self.group = join_group(store, rank, init_info.world_size, init_info.timeout_s, init_info.host)

    def start_weight_update(self) -> None:
        """Make the model ready to take a checkpoint's tensors, in any order."""
        # An update that broke off has left layers half loaded, whose old tensors would count as new ones.
        super().finish_weight_update()
        self.let_go()
        self.reader = TensorReader(self.device)
        super().start_weight_update()

    def receive_weights(self, update_info: BucketInfo) -> None:
        """Load a bucket; afterwards the trainer fills its buffer again."""
        if self.reader is None:
            raise RuntimeError("start_weight_update must come before update_weights. Call it.")
        content = self.open(update_info) if update_info.buffer else self.receive(update_info.num_bytes)
        with disable_mtp_completeness_check():  # a bucket is a part of the model
            self.model.load_weights(self.reader.read(content, update_info.parts))

    def open(self, info: BucketInfo) -> torch.Tensor:
        """Return the bytes of the trainer's buffer, the same one in a whole update."""
        assert info.buffer is not None
        if self.shared[0] != info.buffer:
            self.shared = info.buffer, open_buffer(info.buffer, self.device)
        content: torch.Tensor = self.shared[1]
        return content

    def receive(self, num_bytes: int) -> torch.Tensor:
        """Take part in the broadcast of a bucket; return its bytes."""
        content = torch.empty(num_bytes, dtype=torch.uint8)
        self.group.broadcast([content], build_broadcast_options()).wait()
        return content

    def finish_weight_update(self) -> None:
        """Put what was loaded in place."""
        super().finish_weight_update()
        repack_tied_heads(self.model)
        self.let_go()

    def let_go(self) -> None:
        """Let go of the trainer's buffer."""
        self.reader, self.shared = None, (None, None)

    def shutdown(self) -> None:
        """Leave the group."""
        self.let_go()
        self.group = None
        super().shutdown()


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Rebuild the packed copy of an output head that shares the embedding's weights (vLLM on CPU only).

    A checkpoint has no tensor for a tied head, so a reload never reaches it and it keeps the packed copy made
    at start: log-probs are off by 0.9 nats, while greedy text may even agree.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


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
        """End an update that its trainer did not finish, so that another may start, of any backend."""
        with suppress(RuntimeError):  # none is under way
            self.finish_weight_update()  # type: ignore[attr-defined]

    def name_gpu(self) -> str:
        """Return the UUID of this process's GPU; empty if it has none."""
        device = self.device  # type: ignore[attr-defined]
        return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


WeightTransferEngineFactory.register_engine("rlt", BucketEngine)
