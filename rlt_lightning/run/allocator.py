"""Set PyTorch's allocator of GPU memory, which must happen before torch is imported."""

from __future__ import annotations

from collections.abc import MutableMapping

# The variable of PyTorch's allocator, and its older name: of the trainer's processes, not of workers
# (`start_server`).
ALLOCATOR = "PYTORCH_ALLOC_CONF"
ALLOCATOR_NAMES = {ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF"}


def grow_segments(environment: MutableMapping[str, str]) -> None:
    """Let PyTorch's memory on a GPU grow in place, unless the user has set its allocator.

    Rows and caches have other sizes in every step, and fixed segments leave gaps that nothing fits into.
    PyTorch reads the variable once per process, under its older name too, so call this before torch is
    imported. Processes that are started later inherit it.
    """
    if not ALLOCATOR_NAMES & environment.keys():
        environment[ALLOCATOR] = "expandable_segments:True"
