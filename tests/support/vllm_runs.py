"""Helpers for runs that launch a real vLLM worker: its executable, its processes, what was sampled."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from commands import ROOT

EXECUTABLE = Path(sys.executable).with_name("vllm")
NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(not EXECUTABLE.exists(), reason="needs vLLM: make setup-vllm"),
]


def forked_vllm(folder: Path, program: str = "forked_vllm") -> str:
    """Return an executable that starts like `vllm`, in half the time.

    The benchmark of pushes and the whole runs of `make prove` use `vllm` as it is.
    """
    script = folder / "vllm"
    path = ROOT / "tests" / "support" / f"{program}.py"
    script.write_text(f'#!/bin/sh\nexec {EXECUTABLE.with_name("python")} {path} "$@"\n')
    script.chmod(0o755)
    return str(script)


def worker_pids(run: Path) -> list[int]:
    """Every process of the run's workers: those that were started with its log open."""
    log = str(run / "workers" / "worker-0.log")
    pids = []
    for fd in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if os.readlink(fd) == log:
                pids.append(int(fd.parts[2]))
        except OSError:  # it has just ended, or is not ours
            continue
    return pids


def processes(run: Path) -> list[int]:
    """Server, engine and model worker, without those whose end costs a run nothing."""
    others = b"guard.py", b"resource_tracker"
    found = []
    for pid in sorted(worker_pids(run)):
        with suppress(OSError):  # it has just ended
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if not any(other in command for other in others):
                found.append(pid)
    return found


def completions(run: Path) -> list[tuple[int, int, int, str]]:
    """What was sampled, in the order of the file: step, row, number and text."""
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").open()]
    return [(row["step"], row["row"], row["completion"], row["explanation"]) for row in rows]
