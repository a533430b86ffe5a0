"""Shared by the checks on a GPU: device, sizes, timing, distances. REHEARSE=1 makes everything tiny."""

from __future__ import annotations

import os
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from findings import OUT, Finding, note
from torch import Tensor

from rlt_lightning.modules.phases import synchronise
from rlt_lightning.types import first_line

__all__ = [
    "DEVICE",
    "HALF",
    "ON_CPU",
    "OUT",
    "TINY",
    "Finding",
    "attempt",
    "distance",
    "median_seconds",
    "note",
]

ON_CPU = not torch.cuda.is_available()
TINY = ON_CPU or bool(os.environ.get("REHEARSE"))
DEVICE = torch.device("cpu" if ON_CPU else "cuda")
HALF = torch.float32 if ON_CPU else torch.bfloat16


def attempt(check: str, function: Callable[[], Finding]) -> bool:
    """Note what a function finds, and its error if it has one; return whether nothing failed."""
    try:
        passed, fields = function()
    except torch.OutOfMemoryError as error:
        passed, fields = None, {"why": f"skipped: does not fit ({first_line(error)})"}
    except Exception as error:  # the checks after it still run, and the line says what went wrong
        traceback.print_exc()
        passed, fields = False, {"why": f"{type(error).__name__}: {first_line(error)}"}
    note(check, passed, **fields)
    return passed is not False


def median_seconds(function: Callable[[], Any], rounds: int = 5, warm_up: int = 2) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(warm_up + rounds):
        synchronise(DEVICE)
        start = time.perf_counter()
        function()
        synchronise(DEVICE)
        times.append(time.perf_counter() - start)
    return statistics.median(times[warm_up:])


def distance(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest wanted number."""
    wanted = wanted.detach().double()
    found = found.detach().to(wanted)
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12)).item()
