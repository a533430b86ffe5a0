"""Step 1: everything imports; versions, memory, the allocator and the rate of matrix products."""

from __future__ import annotations

import json
import subprocess
import sys

import torch
from common import DEVICE, TINY, Finding, attempt, note
from side_by_side import provenance

import rlt_lightning.cli
import rlt_lightning.strategies  # noqa: F401
from rlt_lightning.modules.phases import matmul_rate

# What `rlt` does first, in a process that has not imported torch, and what PyTorch makes of it.
ALLOCATOR = """
import json, os
from rlt_lightning.allocator import grow_segments
grow_segments(os.environ)
import torch
torch.zeros(1, device="cuda")
print(json.dumps(torch.cuda.memory._snapshot()["allocator_settings"]))
"""


def allocator() -> Finding:
    """Return whether PyTorch's memory grows in place, and all settings of its allocator."""
    done = subprocess.run([sys.executable, "-c", ALLOCATOR], stdout=subprocess.PIPE, text=True, check=True)
    settings = json.loads(done.stdout.splitlines()[-1])
    return bool(settings["expandable_segments"]), settings


def main() -> None:
    found = provenance()
    found.pop("command")
    if DEVICE.type == "cuda":
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["capability"] = torch.cuda.get_device_capability()
    note("versions", True, **found)
    if TINY:
        note("memory grows in place", why="skipped: needs a GPU")
    else:
        attempt("memory grows in place", allocator)
    for dtype in (torch.float32,) if TINY else (torch.float32, torch.bfloat16):
        note(f"matrix products, {str(dtype)[6:]}", tflops=matmul_rate(DEVICE, dtype) / 1e12)


if __name__ == "__main__":
    main()
