"""`rlt` in a process of its own for every command, forked from one that has imported all: that takes longest.

As a script, it is that one.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import selectors
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
process: subprocess.Popen[str] | None = None


def rlt(*arguments: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m rlt_lightning ARGUMENTS` in the root of the repository.

    Raises:
        subprocess.TimeoutExpired: With all that the command has started killed.
    """
    global process
    if environment:  # libc reads its part of it at the start of a process
        return subprocess.run(
            [sys.executable, "-m", "rlt_lightning", *arguments],
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    if process is None:
        process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
            start_new_session=True,
        )
        atexit.register(end)
    assert process.stdin is not None
    assert process.stdout is not None
    with TemporaryDirectory() as folder, selectors.DefaultSelector() as selector:
        job = {"arguments": arguments, "environment": dict(os.environ), "folder": folder}
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        selector.register(process.stdout, selectors.EVENT_READ)
        answer = process.stdout.readline() if selector.select(timeout) else ""
        if not answer:
            end()
            raise subprocess.TimeoutExpired(["rlt", *arguments], timeout)
        output, errors = ((Path(folder) / name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(["rlt", *arguments], int(answer), output, errors)


def end() -> None:
    """Kill the process that forks, and what it has forked."""
    global process
    if process is not None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process = None


def main() -> None:
    """Fork a process for every line of standard input, and answer with its exit status."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.path.insert(0, str(ROOT))  # this checkout, whichever is installed
    import transformers  # noqa: F401

    import rlt_lightning.cli.main  # noqa: F401

    for line in sys.stdin:
        job = json.loads(line)
        if pid := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)
            continue
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{job['folder']}/{name}", os.O_WRONLY | os.O_CREAT), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(job["environment"])
        sys.argv = ["rlt", *job["arguments"]]
        runpy.run_module("rlt_lightning", run_name="__main__", alter_sys=True)
        return


if __name__ == "__main__":
    main()
