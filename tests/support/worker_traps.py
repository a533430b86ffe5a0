"""Loaded inside a vLLM worker under test: it can switch off the repairs of our extension."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import torch

from rlt_lightning.worker import vllm as worker


class TrapExtension(worker.WorkerExtension):
    """Our extension, with switches."""

    def hash_weights(self) -> str:
        """Return a digest of all weights, to the bit."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.get_model().named_parameters()):  # type: ignore[attr-defined]
            digest.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def count_open_buffers(self) -> int:
        """Return how many buffers of a trainer this process has mapped."""
        return Path("/proc/self/maps").read_text().count("/memfd:rlt-")

    def die_within_update(self, num_tensors: int) -> None:
        """Be killed when that many tensors more have been loaded."""
        model: Any = self.get_model()  # type: ignore[attr-defined]
        load, left = model.load_weights, [num_tensors]

        def load_and_die(weights: Any) -> Any:
            def counted() -> Any:
                for item in weights:
                    left[0] -= 1
                    if left[0] < 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    yield item

            return load(counted())

        model.load_weights = load_and_die

    def leave_tied_heads_stale(self, stale: bool) -> None:
        """Bring back, or take away, vLLM's own behaviour after a reload."""
        worker.repack_tied_heads = ignore if stale else REPAIR


REPAIR = worker.repack_tied_heads


def ignore(model: object) -> None:
    """Repair nothing."""
