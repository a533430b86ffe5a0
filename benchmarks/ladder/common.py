"""What the checks of the GPU ladder share: device, results.jsonl, times, distances.

A check is a script of this folder. It appends one line of JSON per finding to OUT/results.jsonl: `check`,
`passed` (null for a measurement, and for what could not run, which says `why`), and its figures. REHEARSE=1
lets it run at tiny size on a CPU, PRETEND=1 on a pretended GPU.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlt_lightning.modules.phases import synchronise
from rlt_lightning.types import first_line

OUT = Path(os.environ.get("OUT", "runs/gpu_ladder"))
PRETENDED = bool(os.environ.get("PRETEND"))  # the GPU of tests/pretended_gpu
TINY = PRETENDED or (bool(os.environ.get("REHEARSE")) and not torch.cuda.is_available())
ON_CPU = TINY and not PRETENDED
DEVICE = torch.device("cpu" if ON_CPU else "cuda")
HALF = torch.float32 if ON_CPU else torch.bfloat16
Finding = tuple[bool | None, dict[str, Any]]


def note(check: str, passed: bool | None = None, **fields: Any) -> None:
    """Print a finding and append it to the results."""
    line = json.dumps({"check": check, "passed": passed} | fields)
    print(line, flush=True)
    OUT.mkdir(parents=True, exist_ok=True)
    with open(OUT / "results.jsonl", "a") as file:
        file.write(line + "\n")


def attempt(check: str, function: Callable[[], Finding]) -> bool:
    """Note what a function finds, and its error if it has one; return whether nothing failed."""
    try:
        passed, fields = function()
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
    found, wanted = found.detach().double().cpu(), wanted.detach().double().cpu()
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12)).item()
