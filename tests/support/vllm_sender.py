"""A stand-in for vLLM's trainer-side NCCL code, over gloo: the same classes and calls, in any process.

Within `installed`, `NCCLPush` uses it in place of vLLM and a GPU. Like vLLM's, it reads its source while it
sends: a source that gathers when it is read would gather within a send.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from rlt_lightning.engines import nccl
from rlt_lightning.engines.threads import run_in_background
from rlt_lightning.gloo import build_broadcast_options, join_group


@dataclass
class NCCLTrainerInitInfo:
    master_address: str
    master_port: int
    world_size: int
    packed_buffer_size_bytes: int
    rank: int


class ModuleSource:
    """Names, types and shapes without reading; whole tensors when it is iterated."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def metadata(self) -> dict[str, Any]:
        named = list(self.module.named_parameters())
        return {
            "names": [name for name, _ in named],
            "dtype_names": [str(parameter.dtype).removeprefix("torch.") for _, parameter in named],
            "shapes": [list(parameter.shape) for _, parameter in named],
        }

    def __iter__(self) -> Iterator[Any]:
        for _, parameter in self.module.named_parameters():
            yield parameter.full_tensor()


class Sender:
    """The engine: rank 0 of the group."""

    def __init__(self, group: Any, client: Any, source: ModuleSource, note: Callable[[str], None]) -> None:
        self.group, self.client, self.source, self.note = group, client, source, note

    def send_weights(self) -> None:
        self.note("send")
        self.client.start_weight_update()
        received = run_in_background(lambda: self.client.update_weights(self.source.metadata()))
        for tensor in self.source:
            self.note("part")
            piece = tensor.contiguous().view(-1)
            if received.done():
                received.result()  # a worker that has given up says why
            self.group.broadcast([piece], build_broadcast_options()).wait()
        received.result()
        self.client.finish_weight_update()
        self.note("sent")

    def shutdown(self) -> None:
        self.group = None


@contextmanager
def installed(note: Callable[[str], None], timeout_s: float) -> Iterator[None]:
    """Let `NCCLPush` use this file; call `note` with "send", "part" of each tensor, and "sent"."""

    class WeightTransferTrainerFactory:
        @staticmethod
        def trainer_init(info: NCCLTrainerInitInfo, client: Any, source: ModuleSource) -> Sender:
            store = TCPStore(info.master_address, info.master_port, None, True, wait_for_workers=False)
            payload = {"host": info.master_address, "port": info.master_port, "prefix": "nccl"}
            payload |= {"rank_offset": 1, "timeout_s": timeout_s, **asdict(info)}
            joined = run_in_background(lambda: client.init_weight_transfer_engine(payload))
            group = run_in_background(
                lambda: join_group(
                    PrefixStore("nccl", store), 0, info.world_size, timeout_s, info.master_address
                )
            )
            joined.result()
            return Sender(group.result(), client, source, note)

    modules = {name: ModuleType(name) for name in ("vllm", "vllm.distributed")}
    modules["vllm"].__version__ = "0.32.0"  # type: ignore[attr-defined]
    modules["vllm.distributed.weight_transfer"] = package = ModuleType("weight_transfer")
    modules["vllm.distributed.weight_transfer.base"] = base = ModuleType("base")
    modules["vllm.distributed.weight_transfer.nccl_engine"] = engine = ModuleType("nccl_engine")
    package.WeightTransferTrainerFactory = WeightTransferTrainerFactory  # type: ignore[attr-defined]
    base.ModuleSource = ModuleSource  # type: ignore[attr-defined]
    engine.NCCLTrainerInitInfo = NCCLTrainerInitInfo  # type: ignore[attr-defined]
    cuda = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 0,
        set_device=lambda device: None,
        current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(nccl, "torch", SimpleNamespace(cuda=cuda))
        patch.setattr(nccl, "find_spec", lambda name: name)
        yield
