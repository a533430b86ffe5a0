"""Set up a judging process. This module imports little, so that a killed process is replaced quickly."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of prctl(2)


def enter_worker(memory_gib: float) -> None:
    """Make a judging process end with the run, limit its memory, and import what its first task needs."""
    import math_verify  # noqa: F401

    threading.Thread(target=end_with_run, daemon=True).start()
    if sys.platform == "linux":
        # No thread runs while C code computes a power tower; the kernel's signal ends the process even then.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        import resource

        # The imports take up to one GiB, which does not count against the answer.
        start = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = start + int(memory_gib * 2**30)
        # The system may have set a lower limit already.
        with contextlib.suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def end_with_run() -> None:
    """End this process as soon as the run's process has ended, for whatever reason."""
    run = multiprocessing.parent_process()
    assert run is not None
    run.join()
    os._exit(1)
