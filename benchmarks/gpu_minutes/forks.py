"""Start Python once: FOLDER/python does what `python` does, in a fork of a process with the package imported.

    python forks.py FOLDER &      # serves until it is killed; FOLDER/python exists once it is ready

A stage then begins at once instead of after 8 s of imports. The parent must never touch CUDA, whose context
no fork can use. If the process that asked for a command ends, the command ends too, and vice versa.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

CLIENT = """#!{python} -IS
import json, os, socket, sys
job = json.dumps({{"words": sys.argv[1:], "environment": dict(os.environ), "cwd": os.getcwd()}}).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [len(job).to_bytes(4, "big")], [1, 2])
    server.sendall(job)
    sys.exit((server.recv(1) or b"\\1")[0])
"""


def warm_up() -> None:
    """Import what a run imports."""
    from rlt_lightning.allocator import grow_segments

    grow_segments(os.environ)  # before torch
    # Else a question whether there is a GPU makes a context.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.optimization
    import transformers.trainer_utils  # noqa: F401

    import rlt_lightning.cli.main  # noqa: F401

    gc.collect()
    gc.freeze()  # what a fork does not look at, it need not copy


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += connection.recv(size - len(data))
    return data


def end_with(connection: socket.socket) -> None:
    """End this process and its children when the one that asked for it is gone."""
    connection.recv(1)
    os.killpg(0, signal.SIGKILL)


def run(connection: socket.socket, python: str) -> None:
    """Become the command that was asked for; does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    size, descriptors, _, _ = socket.recv_fds(connection, 4, 2)
    for number, descriptor in enumerate(descriptors, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # The parent's streams were opened on other files.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    job = json.loads(receive(connection, int.from_bytes(size, "big")))
    threading.Thread(target=end_with, args=(connection,), daemon=True).start()
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.path += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    sys.executable = python  # what it starts are forks, too
    status: object = 0
    try:
        run_python(job["words"])
    except SystemExit as ending:
        status = ending.code or 0
    except BaseException:  # as Python does at its end
        traceback.print_exc()
        status = 1
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    connection.sendall(bytes([status % 256]))
    os._exit(status % 256)


def run_python(words: list[str]) -> None:
    """Do what `python WORDS` does."""
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<command>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    address, program = folder / "socket", folder / "python"
    for path in (address, program):
        path.unlink(missing_ok=True)
    warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how forks ended
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(address))
    server.listen(64)
    scratch = folder / "python.new"
    scratch.write_text(CLIENT.format(python=sys.executable, address=str(address)))
    scratch.chmod(0o755)
    scratch.rename(program)
    while True:
        connection, _ = server.accept()
        if os.fork() == 0:
            server.close()
            run(connection, str(program))
        connection.close()


if __name__ == "__main__":
    main()
