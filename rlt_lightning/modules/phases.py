"""Measure the cost of a step: seconds, peak memory and tokens per phase."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlt_lightning.models.quantised import dequantised_weights
from rlt_lightning.models.weights import full_shape


@dataclass
class PhaseStats:
    """The cost of one phase of a step so far.

    Attributes:
        seconds: Time on the clock.
        peak_bytes: The most memory in use at any time.
        tokens: Tokens that models computed or sampled.
    """

    seconds: float = 0.0
    peak_bytes: int = 0
    tokens: int = 0


@dataclass
class PhaseTimer:
    """Measures the phases of a step."""

    phases: dict[str, PhaseStats] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @contextmanager
    def __call__(self, phase: str) -> Iterator[PhaseStats]:
        """Add the cost of the block to `phase`."""
        stats = self.phases.setdefault(phase, PhaseStats())
        # Otherwise the work of the phase before would count here.
        synchronise(self.device)
        reset_peak_memory(self.device)
        start = time.perf_counter()
        try:
            yield stats
        finally:
            synchronise(self.device)
            stats.seconds += time.perf_counter() - start
            stats.peak_bytes = max(stats.peak_bytes, peak_memory(self.device))

    def lap(self) -> dict[str, PhaseStats]:
        """Return the costs since the last call, and start from zero."""
        phases, self.phases = self.phases, {}
        return phases


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    """Let `peak_memory` count from now on; a CPU's count restarts only on Linux with a writable /proc."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        # /proc may be missing or read-only.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def resident_bytes(field: str = "VmRSS") -> int | None:
    """Return this process's memory in bytes, now or, for VmHWM, at its peak; None without Linux's /proc."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    [line] = [line for line in status.read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def peak_memory(device: torch.device) -> int:
    """Return the most bytes in use since the last reset: allocated on the GPU, or resident in the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if peak_resident := resident_bytes("VmHWM"):
        return peak_resident
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def count_weights(model: Any) -> float:
    """Return the weights by which a model without its embedding and head multiplies each token.

    Of a mixture's experts only the ones that a token goes through count. A forward computes about twice as
    many floating-point operations per token, and a backward twice as many as a forward.
    """
    config, embedding = model.config.get_text_config(), model.get_input_embeddings().weight
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    chosen = (getattr(config, "num_experts_per_tok", None) or experts) / experts
    weights, codes = 0.0, dequantised_weights(model.base_model)
    for name, parameter in model.base_model.named_parameters():
        shape = codes[name].shape if name in codes else full_shape(parameter)
        if len(shape) >= 2 and parameter is not embedding:
            weights += math.prod(shape) * (chosen if len(shape) == 3 else 1)
    return weights
