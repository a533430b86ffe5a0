"""Copy between main memory and a GPU so that the host waits as rarely as possible.

A copy from ordinary memory waits until the GPU has finished all queued work; one from pinned memory is queued
behind that work. The host must wait for what comes back, so that is copied in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(values: Any, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers, or a tensor, on a device; the host does not wait for it.

    Args:
        values: Numbers as `torch.tensor` takes them, or a tensor.
        device: None: main memory.
        dtype: The type of the numbers; a tensor keeps its type.
    """
    # Within Lightning's configure_model the default device is the GPU.
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype, device="cpu")
    if device is None:
        return tensor
    pinned = tensor.device.type == "cpu" and torch.device(device).type == "cuda"
    return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=pinned)


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors of one type in main memory; the host waits once.

    None shares memory, so that no more is sent to another process than it holds.
    """
    if not tensors:
        return []
    parts = torch.cat([tensor.flatten() for tensor in tensors]).cpu().split([t.numel() for t in tensors])
    return [part.view(tensor.shape).clone() for part, tensor in zip(parts, tensors, strict=True)]
