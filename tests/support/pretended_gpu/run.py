"""Run `rlt` on pretended GPUs, and print what the host waited for.

PRETENDED_GPUS=1 PYTHONPATH=.:tests/support python -m pretended_gpu.run [--waits] fit --config laptop/rlt …
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import nullcontext
from unittest.mock import patch

import pretended_gpu.device  # before torch
from pretended_gpu.waits import count_waits, format_waits


def prepare() -> None:
    """Do what a run here needs once, before it begins."""
    if importlib.util.find_spec("bitsandbytes"):
        import_bitsandbytes()


def import_bitsandbytes() -> None:
    """Import it as on a machine without CUDA: it then has kernels in PyTorch for every device, not compiled.

    Its 8-bit optimizers have none of these, but their kernel for the CPU is in PyTorch too.
    """
    import torch

    with patch("torch.cuda.is_available", lambda: False), patch("torch.compile", None):
        from bitsandbytes.backends.cpu import ops
    step = ops._optimizer_update_8bit_blockwise_cpu
    torch.library.register_kernel("bitsandbytes::optimizer_update_8bit_blockwise", "cuda", step)


def main() -> int:
    """Run the command of the command line; return its exit status."""
    prepare()
    from rlt_lightning.__main__ import main as run_rlt

    counts = "--waits" in sys.argv
    sys.argv = ["rlt", *(argument for argument in sys.argv[1:] if argument != "--waits")]
    with count_waits() if counts else nullcontext() as waits:
        try:
            run_rlt()
            status = 0
        except SystemExit as ending:
            status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    if waits is not None:
        print(format_waits(waits), file=sys.stderr)
    return status


if __name__ == "__main__":
    assert pretended_gpu.device
    sys.exit(main())
