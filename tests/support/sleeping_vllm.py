"""`vllm` on a CPU whose worker, like one on a GPU, gives up its memory and contents while it sleeps.

vLLM's CPU build answers /sleep and /wake_up, but keeps everything. Here a worker at level 2 loses weights,
packed copies of them and the KV cache: their pages go back to the system, and read as zeros until new weights
are pushed.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import forked_vllm
import psutil
import torch
from torch import Tensor
from vllm.v1.worker.cpu_worker import CPUWorker

LIBC = ctypes.CDLL(None, use_errno=True)
MIB = 2**20


def give_back(tensor: Tensor) -> None:
    """Return the pages of a tensor to the system; it reads as zeros from now on."""
    tensor.zero_()
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = (tensor.data_ptr() + tensor.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    arguments = ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED
    if num_bytes > 0 and LIBC.madvise(*arguments) != 0:
        raise OSError(ctypes.get_errno(), "madvise")


def build_forgetful_linear(layer: Any) -> Callable[..., Tensor]:
    """Return what a layer computes whose packed weights are gone: zeros, as with the pages that come back."""
    size = layer.weight.shape[0] if layer.weight.ndim == 2 else layer.output_size_per_partition
    return lambda x, weight, bias: x.new_zeros(*x.shape[:-1], size)


def fill(kv_caches: Iterable[Tensor]) -> None:
    """Take the pages of the KV cache, all of them, as a GPU's worker does at its start."""
    for cache in kv_caches:
        cache.fill_(1)


class SleepingWorker:
    """What replaces methods of vLLM's CPU worker."""

    model_runner: Any
    start = CPUWorker.initialize_from_config
    ignore = CPUWorker.sleep

    def initialize_from_config(self, *arguments: Any, **options: Any) -> None:
        """Take the KV cache whole."""
        SleepingWorker.start(self, *arguments, **options)  # type: ignore[arg-type]
        fill(self.model_runner.kv_caches)

    def sleep(self, level: int = 1) -> None:
        """Give the memory back, and say what vLLM's own method gave, and this one."""
        assert level == 2, "level 1 keeps weights"
        rss = [psutil.Process().memory_info().rss]
        SleepingWorker.ignore(self, level)  # type: ignore[arg-type]
        rss.append(psutil.Process().memory_info().rss)
        with torch.no_grad():
            for layer in self.model_runner.model.modules():
                for weights in layer.parameters(recurse=False):
                    give_back(weights)
                if hasattr(layer, "cpu_linear"):
                    layer.cpu_linear = build_forgetful_linear(layer)
            for cache in self.model_runner.kv_caches:
                give_back(cache)
        rss.append(psutil.Process().memory_info().rss)
        vllms, ours = ((before - after) / MIB for before, after in pairwise(rss))
        print(f"sleep gave back: vLLM's own {vllms:.1f} MiB, the test's {ours:.1f} MiB", flush=True)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the KV cache whole again."""
        fill(self.model_runner.kv_caches)


for name in ("initialize_from_config", "sleep", "wake_up"):
    setattr(CPUWorker, name, vars(SleepingWorker)[name])

if __name__ == "__main__":
    sys.exit(forked_vllm.main())
