"""A model that is only read: the student, or the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlt_lightning.strategies.sharding import Entry, Whole


class FrozenModel:
    """A model that is only read. Not a submodule, so it is in no optimizer, no checkpoint and no wrapper.

    Args:
        entry: The way into the model.
        offload: Keep the weights in host memory, pinned for a GPU, and on the device only inside `on`.
    """

    def __init__(self, entry: Entry, offload: bool = False) -> None:
        self.model: Any = entry.model.eval().requires_grad_(False)
        self.run: Callable[..., Any] = entry  # run(function, *arguments) is function(model, *arguments)
        self.offload = offload

    def place(self, device: torch.device, sharding: Whole) -> None:
        """Get ready to be used on a device: move there or, when offloading to a GPU, pin the weights."""
        self.run = sharding.freeze(self.run)
        if sharding.sharded:
            return
        if not self.offload:
            self.model.to(device)
        elif device.type == "cuda":
            for tensor in self.tensors():
                tensor.data = tensor.data.pin_memory()

    @contextmanager
    def on(self, device: torch.device) -> Iterator[Callable[..., Any]]:
        """The way into the model, on the device for the length of the block; nothing may write to it."""
        if not self.offload:
            yield self.run
            return
        kept = [(tensor, tensor.data) for tensor in self.tensors()]
        for tensor, data in kept:
            tensor.data = data.to(device, non_blocking=True)
        try:
            yield self.run
        finally:
            for tensor, data in kept:
                tensor.data = data

    def tensors(self) -> Iterator[Tensor]:
        """Parameters and buffers, each once."""
        yield from self.model.parameters()
        yield from self.model.buffers()
