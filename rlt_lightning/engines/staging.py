"""Copy weights from a GPU, or to another data type: one buffer is filled while the other is sent.

fill A │ fill B │ fill A │ …
       │ send A │ send B │ …
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class Staging:
    """Two buffers in main memory, pinned for a GPU, so that its copies run beside the sending.

    Weights that are in main memory in the right type are sent without a copy.

    Args:
        num_bytes: Size of each buffer.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.buffers: list[Tensor] = []
        self.turn = 0

    def fill(self, piece: Tensor, dtype: torch.dtype) -> StagedPiece:
        """Begin to copy a flat piece into the buffer that was not filled last.

        The buffer's previous content must have been sent.
        """
        if not piece.is_cuda and piece.dtype == dtype:
            return StagedPiece(piece.view(torch.uint8))
        if not self.buffers:
            self.buffers = [self.buffer(piece.is_cuda) for _ in range(2)]
        self.turn = 1 - self.turn
        target = self.buffers[self.turn][: piece.numel() * dtype.itemsize]
        # The GPU converts the type, so that fewer bytes leave it.
        target.view(dtype).copy_(piece.to(dtype) if piece.is_cuda else piece, non_blocking=piece.is_cuda)
        event = torch.cuda.Event() if piece.is_cuda else None
        if event is not None:
            event.record()
        return StagedPiece(target, event, copied=True)

    def buffer(self, pinned: bool) -> Tensor:
        """Return a new buffer."""
        return torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=pinned)

    def close(self) -> None:
        """Free the buffers."""
        self.buffers = []


class StagedPiece:
    """Bytes in main memory, which may still be arriving.

    Args:
        data: The bytes.
        event: Completes when all bytes have arrived; None: they are there.
        copied: Whether they lie in a buffer, so that their source may be freed.
    """

    def __init__(self, data: Tensor, event: torch.cuda.Event | None = None, copied: bool = False) -> None:
        self.data = data
        self.event = event
        self.copied = copied

    def arrived(self) -> Tensor:
        """Wait for the bytes and return them."""
        if self.event is not None:
            self.event.synchronize()
        return self.data


def pieces(tensor: Tensor, dtype: torch.dtype, piece_bytes: int) -> Iterator[Tensor]:
    """Cut a tensor into flat pieces of at most `piece_bytes` in a type, but of one number at least."""
    yield from tensor.detach().reshape(-1).split(max(1, piece_bytes // dtype.itemsize))
