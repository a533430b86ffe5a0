"""`vllm` whose engine and worker are forked from its server: vLLM is imported once instead of three times.

A start takes 25 s instead of 55 s on two cores. On a CPU vLLM always spawns, hence the patch.
"""

import multiprocessing
import sys

from vllm.utils import system_utils

system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")

import vllm.model_executor.models.llama  # noqa: E402
import vllm.v1.engine.core  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402, F401
from vllm.entrypoints.cli.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
