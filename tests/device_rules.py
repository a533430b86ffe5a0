"""A GPU's rules on a CPU: which tensors would lie on the accelerator, and a strategy that reduces no others.

A CPU has one device, but PyTorch passes an index on: `torch.zeros(2, device="cpu:1")` works, and the
dispatcher sees the index. So a run whose root device is `cpu:N` shows which tensors were made on the root
device, and which in main memory. A result lies on the root device if one of its operands does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FACTORIES = (torch.tensor, torch.as_tensor)  # they choose the device below the dispatcher


class Places:
    """Remembers, for the storage of every tensor that a run makes, whether it is the root device's."""

    def __init__(self, root: torch.device) -> None:
        self.root = root
        self.on_root: dict[int, bool] = {}

    def note(self, results: Any, on_root: bool) -> Any:
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                self.on_root[storage(tensor)] = on_root
        return results

    def has(self, tensor: Tensor) -> bool:
        return self.on_root.get(storage(tensor), False)

    def is_root(self, device: Any) -> bool:
        return torch.device(device) == self.root


def storage(tensor: Any) -> int:
    """Return the address of what holds a tensor's numbers: of this rank's part, if it is sharded."""
    for inner in ("_local_tensor", "elem"):  # of a DTensor, and of the result of its collectives
        tensor = getattr(tensor, inner, tensor)
    address: int = tensor.untyped_storage()._cdata
    return address


class Dispatch(TorchDispatchMode):
    """Notes where the results of every operation lie."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        device = (kwargs or {}).get("device")
        if device is not None:
            return self.places.note(result, self.places.is_root(device))
        operands = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        return self.places.note(result, any(map(self.places.has, operands)))


class Factories(TorchFunctionMode):
    """Notes where tensors lie that are made from numbers."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        device = (kwargs or {}).get("device")
        if function in FACTORIES and (device is not None or not isinstance(args[0], Tensor)):
            self.places.note(result, device is not None and self.places.is_root(device))
        return result


class Refusing:
    """Stands for a strategy's `reduce`: refuses, as NCCL does, what does not lie on the root device."""

    def __init__(self, reduce: Callable[..., Any], places: Places) -> None:
        self.reduce, self.places = reduce, places
        self.number = 0

    def __call__(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        for part in tree_leaves(tensor):
            if isinstance(part, Tensor):
                self.number += 1
                if not self.places.has(part):
                    raise RuntimeError("No backend type associated with device type cpu")
        return self.reduce(tensor, *args, **kwargs)


@contextmanager
def rules_of(root: torch.device) -> Iterator[Places]:
    """Watch where tensors lie."""
    places = Places(root)
    with Dispatch(places), Factories(places):
        yield places
