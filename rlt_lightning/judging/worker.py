"""What a judging process does at its start; light to import, so that one that was killed is soon replaced."""

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
    """Let a judging process end with the run, limit its memory, and import what its first task needs."""
    import math_verify  # noqa: F401

    threading.Thread(target=end_with_run, daemon=True).start()
    if sys.platform == "linux":  # the thread does not get to run while C code computes a power tower
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        import resource

        # What the imports take, up to one GiB, no answer is to blame for.
        start = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = start + int(memory_gib * 2**30)
        with contextlib.suppress(ValueError):  # above a limit that is there already
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def end_with_run() -> None:
    """Wait until the process that judges for the run is gone, in whatever way, and end this one."""
    run = multiprocessing.parent_process()
    assert run is not None
    run.join()
    os._exit(1)
