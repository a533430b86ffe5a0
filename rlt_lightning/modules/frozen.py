"""Models that are only read: the student, the reference, or the policy without its adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlt_lightning.strategies.sharding import ModelEntry, Unsharded

# run(function, *arguments) is function(model, *arguments).
RunModel = Callable[..., Any]


class ReadModel:
    """A model that is only read, through `run`; its weights are on the device.

    Args:
        run: Calls the model.
        is_policy: Whether it is the trained model, with or without its adapter: its head is the policy's.
    """

    def __init__(self, run: RunModel, is_policy: bool = False) -> None:
        self.run = run
        self.is_policy = is_policy

    @contextmanager
    def loaded_on(self, device: torch.device) -> Iterator[RunModel]:
        """Yield `run` with the model on the device inside the block; nothing may write to the weights."""
        yield self.run


class FrozenModel(ReadModel):
    """A model with its own weights. Not a submodule, so it is in no optimizer, no checkpoint and no wrapper.

    Args:
        entry: The entry of the model.
        offload: Keep the weights in host memory, pinned for a GPU, and on the device only inside `loaded_on`.
    """

    def __init__(self, entry: ModelEntry, offload: bool = False) -> None:
        super().__init__(entry)
        self.is_placed = False
        self.model: Any = entry.model.eval().requires_grad_(False)
        self.offload = offload

    def place(self, device: torch.device, sharding: Unsharded) -> None:
        """Move the model to a device or, when offloading to a GPU, pin its weights in host memory."""
        if not self.is_placed:  # a second verb of a trainer would give it to a second engine
            self.run = sharding.freeze(self.run)
        self.is_placed = True
        if sharding.sharded:
            return
        if not self.offload:
            self.model.to(device)
        elif device.type == "cuda":
            for tensor in self.tensors():
                tensor.data = tensor.data.pin_memory()

    @contextmanager
    def loaded_on(self, device: torch.device) -> Iterator[RunModel]:
        """See `ReadModel`."""
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
        """Yield parameters and buffers, each once."""
        yield from self.model.parameters()
        yield from self.model.buffers()
