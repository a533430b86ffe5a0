"""Do what `python WORDS` does, on pretended GPUs.

PRETENDED_GPUS=1 PYTHONPATH=.:tests/support python -m pretended_gpu.run -m rlt_lightning fit …
"""

from __future__ import annotations

import importlib.util
import sys
from unittest.mock import patch

from commands import run_words

import pretended_gpu.device  # noqa: F401  (before torch)


def prepare() -> None:
    """Import bitsandbytes, if it is there, as on a machine without CUDA.

    It then has kernels in PyTorch for every device, not compiled. Its 8-bit optimizers have none of these,
    but their kernel for the CPU is in PyTorch too.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        return
    import torch

    with patch("torch.cuda.is_available", lambda: False), patch("torch.compile", None):
        from bitsandbytes.backends.cpu import ops
    step = ops._optimizer_update_8bit_blockwise_cpu
    torch.library.register_kernel("bitsandbytes::optimizer_update_8bit_blockwise", "cuda", step)


if __name__ == "__main__":
    prepare()
    run_words(sys.argv[1:])
