"""Make PyTorch believe in a CUDA GPU; to be imported before torch.

What a CUDA build compiles into `torch.cuda` stands here as Python: devices, streams, events, memory.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

# isort: off
from pretended_gpu.load import ext  # before torch
import pretended_gpu.collectives
import pretended_gpu.kernels  # noqa: F401
import torch
import torch.cuda.nccl
# isort: on

GIB = 2**30
TOTAL_GIB, FREE_GIB = 80, 60  # as an H100's, of which others use some
NAME = "Pretended H100"


def set_device_count(count: int) -> None:
    """Pretend so many GPUs."""
    ext.set_device_count(count)


set_device_count(int(os.environ.get("PRETENDED_GPUS", "1")))


def index_of(device: Any = None) -> int:
    """Return the number of a device; None: of the current one."""
    if isinstance(device, int) and device >= 0:
        return device
    if device is None or isinstance(device, int):
        return ext.get_device()
    index = torch.device(device).index
    return ext.get_device() if index is None else index


def wait(kind: str) -> None:
    """Tell who counts that the host waits for the device."""
    if on_wait is not None:
        on_wait(kind)


on_wait: Any = None


def set_on_wait(function: Any) -> None:
    """Call the function with the kind of each wait from now on; None: no longer."""
    global on_wait
    on_wait = function
    ext.set_on_wait(function)


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **options: Any) -> Stream:
        options.pop("stream_ptr", None)
        if options:
            return super().__new__(cls, **options)
        return super().__new__(cls, device=torch.device("cuda", index_of(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None:
        wait("stream.synchronize")

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.time_s = 0.0

    def record(self, stream: Any = None) -> None:
        self.time_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        wait("event.synchronize")

    def elapsed_time(self, end: Event) -> float:
        return (end.time_s - self.time_s) * 1e3


class Properties:
    name, major, minor = NAME, 9, 0
    total_memory, multi_processor_count, L2_cache_size = TOTAL_GIB * GIB, 132, 50 * 2**20
    warp_size, max_threads_per_multi_processor, regs_per_multiprocessor = 32, 2048, 65536
    shared_memory_per_block, shared_memory_per_block_optin = 49152, 232448
    shared_memory_per_multiprocessor = 233472
    gcnArchName, uuid, is_integrated, is_multi_gpu_board = "", "pretended", 0, 0


class Device:
    """Stands for `torch.cuda.device`, a context."""

    def __init__(self, device: Any) -> None:
        self.index = -1 if device is None else index_of(device)

    def __enter__(self) -> None:
        self.before = exchange_device(self.index)

    def __exit__(self, *_: Any) -> bool:
        ext.set_device(self.before)
        return False


def exchange_device(index: int) -> int:
    before: int = ext.get_device()
    if index >= 0:
        ext.set_device(index)
    return before


def set_device(device: Any) -> None:
    ext.set_device(index_of(device))


streams: dict[int, Stream] = {}  # the default one of each device
chosen: dict[int, Stream] = {}  # the current one, where it is another


def default_stream(device: Any = None) -> Stream:
    index = index_of(device)
    return streams.setdefault(index, Stream(index))


def current_stream(device: Any = None) -> Stream:
    index = index_of(device)
    return chosen.get(index) or default_stream(index)


@contextlib.contextmanager
def use_stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    index = stream.device_index
    before = chosen.get(index)
    chosen[index] = stream
    try:
        yield
    finally:
        chosen.pop(index) if before is None else chosen.update({index: before})


def synchronize(device: Any = None) -> None:
    wait("torch.cuda.synchronize")


def allocated(device: Any = None) -> int:
    return ext.allocated(index_of(device))


def peak(device: Any = None) -> int:
    return ext.peak(index_of(device))


def reset_peak(device: Any = None) -> None:
    ext.reset_peak(index_of(device))


def memory_stats(device: Any = None) -> dict[str, int]:
    found = {"allocated_bytes.all.current": allocated(device), "allocated_bytes.all.peak": peak(device)}
    return defaultdict(int, found)


def generator_state(device: Any = "cuda") -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8, device="cpu")


def nothing(*_: Any, **__: Any) -> None: ...


def always(value: Any) -> Any:
    return lambda *_, **__: value


def copy_function(value: Any) -> Any:
    """Return a function of its own: torch.compile refuses one that stands under two names."""
    if isinstance(value, type) or not callable(value):
        return value
    return lambda *args, **kwargs: value(*args, **kwargs)


def device_count() -> int:
    return ext.device_count()


OF_TORCH_CUDA: dict[str, Any] = {
    "is_available": always(True),
    "is_initialized": always(True),
    "_initialized": True,
    "_is_compiled": always(True),
    "_is_in_bad_fork": always(False),
    "_lazy_init": nothing,
    "init": nothing,
    "device": Device,
    "_DeviceGuard": Device,
    "device_count": device_count,
    "_device_count_nvml": device_count,
    "current_device": ext.get_device,
    "set_device": set_device,
    "_exchange_device": exchange_device,
    "_maybe_exchange_device": exchange_device,
    "can_device_access_peer": always(True),
    "get_device_properties": always(Properties()),
    "get_device_name": always(NAME),
    "get_device_capability": always((9, 0)),
    "get_arch_list": always(["sm_90"]),
    "has_half": True,
    "is_bf16_supported": always(True),
    "is_tf32_supported": always(True),
    "utilization": always(0),
    "synchronize": synchronize,
    "Stream": Stream,
    "Event": Event,
    "stream": use_stream,
    "StreamContext": use_stream,
    "set_stream": nothing,
    "current_stream": current_stream,
    "default_stream": default_stream,
    "is_current_stream_capturing": always(False),
    "memory_allocated": allocated,
    "memory_reserved": allocated,
    "max_memory_allocated": peak,
    "max_memory_reserved": peak,
    "reset_peak_memory_stats": reset_peak,
    "reset_max_memory_allocated": reset_peak,
    "memory_stats": memory_stats,
    "mem_get_info": always((FREE_GIB * GIB, TOTAL_GIB * GIB)),
    "empty_cache": nothing,
    "ipc_collect": nothing,
    # Numbers without a generator of their own are drawn from the CPU's.
    "manual_seed": nothing,
    "manual_seed_all": nothing,
    "get_rng_state": generator_state,
    "get_rng_state_all": lambda: [generator_state()] * device_count(),
    "set_rng_state": nothing,
    "set_rng_state_all": nothing,
}
OF_TORCH_C: dict[str, Any] = {
    "_cuda_init": nothing,
    "_cuda_isInBadFork": always(False),
    "_cuda_getCompiledVersion": always(13000),
    "_cuda_hasPrimaryContext": always(True),
    "_cuda_getDeviceCount": device_count,
    "_cuda_getDevice": ext.get_device,
    "_cuda_setDevice": ext.set_device,
    "_cuda_exchangeDevice": exchange_device,
    "_cuda_maybeExchangeDevice": exchange_device,
    "_cuda_getCurrentRawStream": always(0),
    "_cuda_isCurrentStreamCapturing": always(False),
    "_cuda_synchronize": synchronize,
    "_cuda_clearCublasWorkspaces": nothing,
    "_cuda_emptyCache": nothing,
    "_cuda_memoryStats": memory_stats,
    "_nccl_version": always((2, 29, 7)),
}


class Ranges:
    """Stands for `torch.cuda.nvtx`, which marks ranges for profilers."""

    def __getattr__(self, name: str) -> Any:
        return always(None)


def patch_torch() -> None:
    """Replace what a build without CUDA lacks, or refuses."""
    functions = {name: copy_function(value) for name, value in OF_TORCH_CUDA.items()}
    for module in (torch.cuda, torch.cuda.streams, torch.cuda.memory, torch.cuda.random):
        for name in functions:
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, functions[name])
    for name, value in OF_TORCH_C.items():
        setattr(torch._C, name, copy_function(value))
    torch.cuda.nccl.version = always((2, 29, 7))
    torch.cuda.nvtx = Ranges()  # type: ignore[assignment]
    torch.version.cuda = "13.0"
    torch.backends.cuda.is_built = always(True)
    for name in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Byte", "Char", "Bool"):
        setattr(torch.cuda, f"{name}Tensor", type(f"{name}Tensor", (), {}))


patch_torch()

CPU_RESIZE, CPU_CLONE = torch.UntypedStorage.resize_, torch.UntypedStorage.clone


def bytes_of(storage: torch.UntypedStorage, size: int) -> torch.Tensor:
    """Return a tensor of bytes over a storage of the device."""
    tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return tensor.set_(storage, 0, (size,), (1,))  # type: ignore[call-overload]


def resize_storage(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if self.device.type != "cuda":
        return CPU_RESIZE(self, size)
    ext.resize_storage(bytes_of(self, 0), size)
    return self


def clone_storage(self: torch.UntypedStorage) -> torch.UntypedStorage:
    if self.device.type != "cuda":
        return CPU_CLONE(self)
    return bytes_of(self, self.nbytes()).clone().untyped_storage()


torch.UntypedStorage.resize_ = resize_storage  # type: ignore[method-assign]
torch.UntypedStorage.clone = clone_storage  # type: ignore[method-assign]

# What CUDA IPC shares, by its handle: only this process can open it.
SHARED: dict[bytes, torch.UntypedStorage] = {}


def share_storage(self: torch.UntypedStorage) -> tuple[Any, ...]:
    handle = f"{len(SHARED):064d}".encode()
    SHARED[handle] = self
    return 0, handle, self.nbytes(), 0, b"counter", 0, b"event", False


def open_storage(device: int, handle: bytes, *_: Any) -> torch.UntypedStorage:
    return SHARED[handle]


torch.UntypedStorage._share_cuda_ = share_storage  # type: ignore[method-assign,assignment]
torch.UntypedStorage._new_shared_cuda = staticmethod(open_storage)  # type: ignore[method-assign,assignment]
