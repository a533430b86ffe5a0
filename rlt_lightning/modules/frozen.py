"""Models that score completions and are not trained: student, reference, the policy without adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from rlt_lightning.strategies.sharding import ModelEntry, WeightLayout

# run(function, *arguments) is function(model, *arguments).
RunModel = Callable[..., Any]


@dataclass(eq=False)
class Model:
    """A model that scores completions, called through `run`; it is in no optimizer, checkpoint or wrapper.

    Args:
        run: Calls the model.
        model: The model, if its weights are not the trained model's; None: if they are.
        offload: Keep the weights in host memory, pinned for a GPU, and on the device only inside `loaded_on`.
        is_policy: Whether it is the trained model, with or without its adapter: its head is the policy's.
    """

    run: RunModel
    model: Any = None
    offload: bool = False
    is_policy: bool = False
    is_placed: bool = field(default=False, init=False)

    @classmethod
    def frozen(cls, entry: ModelEntry, offload: bool = False) -> Self:
        """Return a model whose weights nobody trains."""
        return cls(entry, entry.model.eval().requires_grad_(False), offload)

    def place(self, device: torch.device, sharding: WeightLayout) -> None:
        """Move the weights to a device or, when offloading to a GPU, pin them in host memory."""
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
        """Yield `run` with the model on the device inside the block; nothing may write to the weights."""
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
