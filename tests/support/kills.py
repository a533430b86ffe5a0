"""Find the processes of a run, kill or terminate them, and wait until they have ended."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from random import Random

import psutil
import pytest
from commands import RANK_1, Running

ENDS_WITHIN_S = 15.0  # all processes, after one was killed; a loaded machine is slow to see them off


def processes(run: Running) -> list[psutil.Process]:
    """All that live of a run, rank 0 first."""
    own = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == run.pid and process.status() != psutil.STATUS_ZOMBIE:
                own.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return sorted(own, key=lambda process: process.pid)


def is_alive(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def kill(run: Running, victim: str) -> float:
    """Kill all ranks, or one; returns the seconds until nothing was left."""
    killed_at = time.monotonic()
    if victim == "all":
        os.killpg(run.pid, signal.SIGKILL)
    else:
        os.kill(ranks_of(run)[-1] if victim == RANK_1 else run.pid, signal.SIGKILL)  # perhaps none but rank 0
    while left := processes(run):
        run.poll()
        if time.monotonic() > killed_at + ENDS_WITHIN_S:
            os.killpg(run.pid, signal.SIGKILL)
            pytest.fail(f"{left} outlived {victim}")
        time.sleep(0.05)
    run.wait()
    return time.monotonic() - killed_at


def ranks_of(run: Running) -> list[int]:
    """The process ids of rank 0 and rank 1."""
    return [run.pid, *(process.pid for process in processes(run) if process.name() == RANK_1)]


def send_sigterm(run: Running, to: str, random: Random) -> None:
    """Send SIGTERM to the group, as `timeout` does, to one rank, or to both one after the other."""
    if to in ("rank 0", "rank 1"):
        os.kill(ranks_of(run)[int(to[-1])], signal.SIGTERM)
    elif to == "both":
        for pid in random.sample(ranks_of(run), k=2):
            os.kill(pid, signal.SIGTERM)
            time.sleep(random.uniform(0, 0.1))
    else:
        os.killpg(run.pid, signal.SIGTERM)
    if to == "the group twice":
        time.sleep(random.uniform(0, 0.1))
        os.killpg(run.pid, signal.SIGTERM)


def wait_for(condition: Callable[[], bool], run: Running) -> None:
    """Wait for something that happens while the command runs."""
    deadline = time.monotonic() + 600
    while not condition():
        if run.poll() is not None or time.monotonic() > deadline:
            run.killpg()
            pytest.fail(f"status {run.returncode}: {run.stderr[-3000:]}")
        time.sleep(0.001)


def fault(hook: str, kind: str, step: int = 1, rank: int = 0, **options: int) -> str:
    """Return an option with which a run has a `faults.Fault`."""
    arguments = {"rank": rank, "hook": hook, "kind": kind, "step": step} | options
    return "--trainer.callbacks+=" + json.dumps({"class_path": "faults.Fault", "init_args": arguments})
