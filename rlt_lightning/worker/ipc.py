"""Memory that the trainer shares with vLLM workers on its machine; both sides import it.

It needs only torch. A worker is told where the memory lies by numbers and text, so it unpickles nothing:

    HostBuffer   a file in main memory without a name, which every process of this user may open
    GPUBuffer    CUDA IPC, for a worker on the trainer's own GPU
"""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

JSON = dict[str, Any]
# As in models/weights.py, which needs packages that the worker's environment may lack.
NamedTensor = tuple[str, Tensor]
# What PyTorch says of memory that it shares by CUDA IPC, after the number of the GPU; see `_share_cuda_`.
CUDA_FIELDS = ("memory", "num_bytes", "offset", "counter", "counter_offset", "event", "must_wait")
CUDA_BYTES = ("memory", "counter", "event")


class HostBuffer:
    """A buffer in main memory. The kernel frees it with the last process that holds it, however that ends.

    Args:
        num_bytes: Its size.
    """

    def __init__(self, num_bytes: int) -> None:
        self.name = f"rlt-{uuid4().hex}"
        self.file = os.memfd_create(self.name)
        try:
            os.posix_fallocate(self.file, 0, num_bytes)  # without room: an error here, no signal later
            self.tensor = map_bytes(f"/proc/self/fd/{self.file}", num_bytes)
        except (OSError, RuntimeError):
            os.close(self.file)
            raise

    def share(self, worker: str) -> JSON:
        """Return what a worker must know to open the buffer; the same for all."""
        return {"process": os.getpid(), "file": self.file, "name": self.name, "num_bytes": len(self.tensor)}

    def close(self) -> None:
        """Let go of the buffer."""
        os.close(self.file)
        del self.tensor


class GPUBuffer:
    """A buffer on a GPU, for workers on the same GPU.

    PyTorch frees it when each worker that it was shared with has let go of it, once.

    Args:
        num_bytes: Its size.
        device: The GPU.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        with fixed_segments():
            self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.shared: dict[str, JSON] = {}  # by worker

    def share(self, worker: str) -> JSON:
        """Return what a worker must know to open the buffer."""
        if worker not in self.shared:
            _, *fields = self.tensor.untyped_storage()._share_cuda_()
            info = dict(zip(CUDA_FIELDS, fields, strict=True))
            self.shared[worker] = info | {name: b64encode(info[name]).decode() for name in CUDA_BYTES}
        return self.shared[worker]

    def close(self) -> None:
        """Let go of the buffer."""
        del self.tensor
        torch.cuda.ipc_collect()


class TensorReader:
    """A worker's side: it takes whole tensors out of a buffer that the trainer fills again and again.

    Args:
        device: Device of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensor: Tensor | None = None  # it is put together from pieces, over several buffers' content

    def read(self, content: Tensor, parts: list[JSON]) -> Iterator[NamedTensor]:
        """Yield copies of the tensors that are whole: vLLM's reload keeps them until a layer is complete.

        Args:
            content: The buffer's bytes.
            parts: What lies in it: name, dtype and shape of the tensor, bytes before the part in the tensor
                (begin) and in the buffer (offset), and its size (num_bytes).
        """
        for part in parts:
            begin, offset, num_bytes = part["begin"], part["offset"], part["num_bytes"]
            if begin == 0:
                dtype = getattr(torch, part["dtype"])
                self.tensor = torch.empty(part["shape"], dtype=dtype, device=self.device)
            assert self.tensor is not None
            target = self.tensor.view(-1).view(torch.uint8)
            target[begin : begin + num_bytes].copy_(content[offset : offset + num_bytes])
            if begin + num_bytes == len(target):
                whole, self.tensor = self.tensor, None
                yield part["name"], whole


def open_buffer(info: JSON, device: torch.device) -> Tensor:
    """Return the bytes of a buffer that another process shares.

    Args:
        info: What its `share` returned.
        device: Device of this process; a GPUBuffer lies on it.
    """
    if "memory" in info:
        fields = [b64decode(info[name]) if name in CUDA_BYTES else info[name] for name in CUDA_FIELDS]
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *fields)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    path = f"/proc/{int(info['process'])}/fd/{int(info['file'])}"
    if os.readlink(path) != f"/memfd:{info['name']} (deleted)":
        raise FileNotFoundError(f"{path} must be the trainer's buffer, but is another file.")
    return map_bytes(path, info["num_bytes"])


def map_bytes(path: str, num_bytes: int) -> Tensor:
    """Return a file's bytes; what a process writes to them all others see."""
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


@contextmanager
def fixed_segments() -> Iterator[None]:
    """Allocate GPU memory inside the block in segments that cannot grow: only these can be shared."""
    settings = torch._C._accelerator_getAllocatorSettings()
    growing, fixed = "expandable_segments:True", "expandable_segments:False"
    torch._C._accelerator_setAllocatorSettings(settings.replace(growing, fixed))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)
