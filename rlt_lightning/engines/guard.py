"""Run a command that must not outlive the process that asked for it: `python guard.py COMMAND ARGUMENT …`.

It needs only Python. Standard input is a pipe held by the asking process. However that process ends, even by
SIGKILL, the pipe closes, and the command is stopped with everything that it has started.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE_S = 5.0  # between SIGTERM and SIGKILL


def main() -> None:
    """Start the command in this process's group, and end with it."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # the command gets it, the guard stays to see it end
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=stop_when_orphaned, args=(child,), daemon=True).start()
    status = child.wait()
    print(f"guard: the worker ended with status {status}", file=sys.stderr, flush=True)
    stop_group(child)


def stop_when_orphaned(child: "subprocess.Popen[bytes]") -> None:
    """Wait until the asking process closes the pipe or is gone."""
    sys.stdin.buffer.read()
    stop_group(child)


def stop_group(child: "subprocess.Popen[bytes]") -> None:
    """Stop the whole process group, this process last."""
    os.killpg(0, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
