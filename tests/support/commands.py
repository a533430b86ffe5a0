"""Run each `rlt` command, or Python code, in a new process, forked from one that has the imports.

The time of a start is mostly imports, and tables that transformers and jsonargparse build once per process.
So one process, this file run as a script, does that once:

    test: start(...) -- a job, a line of JSON --> the warm process -- fork --> `rlt` -- fork --> its rank 1
    test: Running.poll() -- its process id ------> the warm process -- its exit status, or null --> the test

`fresh=True` starts Python itself: for code that reads the environment at its start, and to test a real start.
`gpus=2` runs the command where PyTorch believes in two GPUs: see tests/support/pretended_gpu.
`make_forked_python` makes a `python` for scripts that start many processes, so that these are forks too.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import os
import runpy
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from select import select
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
warm: dict[bool, subprocess.Popen[str]] = {}  # by whether it has pretended GPUs
asking = threading.Lock()
living: list[Running] = []
longest_s = 570.0  # what a command may take: conftest sets it a little below what a test may
RANK_1 = "rank 1"  # the name of a second rank's process
PRETEND = "--pretend"  # given to a warm process: there are GPUs


class Running:
    """A command that runs in a session of its own: what tests use of subprocess.Popen, and its output.

    Args:
        log: Where standard output and error go together; None keeps them apart, in `stdout` and `stderr`.
        text: The standard input; None: the lines that `send` sends.
        code: Python to run instead of `rlt`.
        gpus: How many GPUs PyTorch believes in.
    """

    def __init__(
        self,
        arguments: tuple[str, ...],
        log: Path | None,
        cwd: Path,
        text: str | None,
        environment: dict[str, str],
        code: str = "",
        gpus: int = 0,
    ) -> None:
        self.gpus = gpus
        self.args = ["rlt", *arguments]
        self.folder = TemporaryDirectory()
        folder = Path(self.folder.name)
        if text is None:
            os.mkfifo(folder / "stdin")
        else:
            (folder / "stdin").write_text(text)
        self.outputs = [log or folder / name for name in ("stdout", "stderr")]
        for path in self.outputs:
            path.touch()
        words = ["-c", code] if code else ["-m", "rlt_lightning", *arguments]
        job = {"words": words, "environment": dict(os.environ) | environment, "cwd": str(cwd)}
        job |= {"stdin": str(folder / "stdin"), "outputs": list(map(str, self.outputs)), "gpus": gpus}
        self.returncode: int | None = None
        self.pid = int(ask(job, gpus > 0))
        self.stdin = open(folder / "stdin", "w") if text is None else None  # noqa: SIM115  (as long as it runs)
        living.append(self)

    @property
    def stdout(self) -> str:
        return self.outputs[0].read_text()

    @property
    def stderr(self) -> str:
        return self.outputs[1].read_text()

    def send(self, line: str) -> None:
        """Send a line to the standard input."""
        assert self.stdin is not None
        self.stdin.write(line + "\n")
        self.stdin.flush()

    def poll(self) -> int | None:
        """Return the exit status, or None while the command runs."""
        if self.returncode is None and (answer := ask({"poll": self.pid}, self.gpus > 0)) is not None:
            self.returncode = int(answer)
            living.remove(self)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: With the command, and all that it has started, killed.
        """
        timeout = longest_s if timeout is None else timeout
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.killpg()
                raise subprocess.TimeoutExpired(self.args, timeout, self.stdout, self.stderr)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """Kill the command itself."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def killpg(self) -> None:
        """Kill the command and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def path_of_tests() -> str:
    """Return the PYTHONPATH of a process that imports modules of the tests."""
    return os.pathsep.join([str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")])


def wait_until(holds: Callable[[], bool], seconds: float = 300) -> None:
    """Wait for something that happens soon, however busy the machine is."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"it has not happened within {seconds:g} s"
        time.sleep(0.01)


def start(
    *arguments: str,
    log: Path | None = None,
    cwd: Path = ROOT,
    text: str = "",
    gpus: int = 0,
    **environment: str,
) -> Running:
    """Start `rlt ARGUMENTS` and return at once; `text` is its standard input."""
    return Running(arguments, log, cwd, text, environment, gpus=gpus)


def rlt(
    *arguments: str, cwd: Path = ROOT, text: str = "", fresh: bool = False, gpus: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `rlt ARGUMENTS` to its end.

    Raises:
        subprocess.TimeoutExpired: With all that the command has started killed.
    """
    if fresh:
        return run_fresh(["-m", "rlt_lightning", *arguments], cwd, text, environment)
    process = start(*arguments, cwd=cwd, text=text, gpus=gpus, **environment)
    return subprocess.CompletedProcess(process.args, process.wait(), process.stdout, process.stderr)


def python(
    code: str, cwd: Path, fresh: bool = False, gpus: int = 0, text: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python code to its end, in a process that has the package imported."""
    if fresh:
        return run_fresh(["-c", code], cwd, text, environment)
    process = Running((), None, cwd, text, environment, code, gpus)
    return subprocess.CompletedProcess(process.args, process.wait(), process.stdout, process.stderr)


def run_fresh(
    words: list[str], cwd: Path, text: str, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` to its end, in a session of its own."""
    own = {"PYTHONPATH": str(ROOT)} | os.environ | environment
    options: dict[str, Any] = {"capture_output": True, "text": True, "start_new_session": True}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=own, input=text, timeout=longest_s, **options
    )


def run_rlt(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `rlt ARGUMENTS` to its end, which must be a good one."""
    return require_success(rlt(*arguments, **options))


def run_python(code: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python code to its end, which must be a good one."""
    return require_success(python(code, cwd, **options))


def require_success(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert done.returncode == 0, f"{done.args}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done


def start_fresh(words: list[str], log: Path, cwd: Path = ROOT, **environment: str) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, whose output is added to a log."""
    with log.open("ab") as file:
        streams = {"stdout": file, "stderr": file}
        own = os.environ | environment
        return subprocess.Popen(words, cwd=cwd, env=own, start_new_session=True, **streams)


# What `make_forked_python` writes. It has the job's standard output and error, and ends as the job does.
FORKED_PYTHON = """#!{python} -IS
import json, os, socket, sys
streams = {{"stdin": os.devnull, "outputs": [f"/proc/{{os.getpid()}}/fd/{{n}}" for n in (1, 2)]}}
job = {{"words": sys.argv[1:], "environment": dict(os.environ), "cwd": os.getcwd()}} | streams
with socket.create_connection(("127.0.0.1", {port})) as server, server.makefile("rw") as stream:
    print(json.dumps(job), file=stream, flush=True)
    sys.exit(int(stream.readline()))
"""


class Forks(socketserver.StreamRequestHandler):
    """Run the job of one call of a forked python to its end, and tell its exit status."""

    def handle(self) -> None:
        pid = int(ask(json.loads(self.rfile.readline())))
        while (status := ask({"poll": pid})) is None:
            if select([self.connection], [], [], 0.02)[0]:  # it sends nothing more, so it has been killed
                os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):  # nobody is left to be told
            self.wfile.write(f"{status}\n".encode())


def make_forked_python(folder: Path) -> str:
    """Write an executable that does what `python` does, in a process that has the package imported.

    It works as long as the process of the tests lives, without standard input.
    """
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Forks)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    program = folder / "python"
    program.write_text(FORKED_PYTHON.format(python=sys.executable, port=server.server_address[1]))
    program.chmod(0o755)
    return str(program)


def ask(job: dict[str, Any], pretends: bool = False) -> Any:
    """Send a line to the warm process, which is started with the first, and return its answer."""
    with asking:
        if pretends not in warm:
            if not warm:
                atexit.register(end)
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            command = [sys.executable, __file__, *([PRETEND] if pretends else [])]
            warm[pretends] = subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **pipes)
        process = warm[pretends]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())


def end() -> None:
    """Kill the warm processes and the commands that they run."""
    for command in living:
        command.killpg()
    for process in warm.values():
        process.kill()
        process.wait()


# In the warm process


def main() -> None:
    """Answer each line of standard input: fork a command, or tell what became of one."""
    gc.set_threshold(10_000)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.path.insert(0, str(ROOT))  # this checkout, whichever is installed
    warm_up()
    for line in sys.stdin:
        job = json.loads(line)
        if "poll" in job:
            pid, status = os.waitpid(job["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            reading, writing = os.pipe()
            if (answer := os.fork()) == 0:
                os.setsid()
                os.close(writing)
                answers.close()
                run(job)
            os.close(writing)
            os.read(reading, 1)  # returns when the command has a session, by which it may be killed
            os.close(reading)
        print(json.dumps(answer), file=answers, flush=True)


def warm_up() -> None:
    """Import what a run imports, and have a config read and a model loaded once, for what that caches."""
    if PRETEND in sys.argv:
        import pretended_gpu.run as pretended  # before torch

        pretended.prepare()
    import pandas  # noqa: F401  (pyarrow imports it at the first list)
    import peft  # noqa: F401
    import transformers.optimization
    import transformers.trainer_utils  # noqa: F401
    from tqdm import tqdm

    from rlt_lightning.cli.main import run
    from rlt_lightning.models.embedded import MINIATURES
    from rlt_lightning.models.load import load_model

    sys.argv = ["rlt", "fit", "--config=tests/rlt.yaml", "--print_config"]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        run()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a command that ends ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which jobs in the background ignore
    tqdm.set_lock(threading.RLock())  # all forks share its own: one that is killed within it stops the others
    load_model(str(MINIATURES["miniature"]))
    gc.collect()
    gc.freeze()  # what a fork does not look at, it need not copy


def run(job: dict[str, Any]) -> None:
    """Become the command; does not return."""
    os.dup2(os.open(job["stdin"], os.O_RDONLY), 0)
    for number, path in enumerate(job["outputs"], 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environment"])
    if job.get("gpus"):
        os.environ.pop("DS_ACCELERATOR", None)  # set by a run on CPUs in the process of the tests
        import pretended_gpu.device as device

        device.set_device_count(job["gpus"])
    sys.path += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    words = job["words"]
    if words[:2] == ["-m", "rlt_lightning"] and any(word.endswith("devices=2") for word in words):
        fork_rank_1()
    status: object = 0
    try:
        run_words(words)
    except SystemExit as ending:
        status = ending.code or 0
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    end_process(status)


def run_words(words: list[str]) -> None:
    """Do what `python WORDS` does."""
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<block>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def end_process(status: int) -> None:
    """End as Python does, but for clearing up 5000 modules, which takes as long as a test."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


class Rank1(subprocess.Popen[bytes]):
    """A fork of rank 0 that waits for its environment, in place of the process that Lightning starts."""

    def __init__(self, pid: int, pipe: int, environment: dict[str, str]) -> None:
        self.pid, self.args, self.returncode = pid, sys.argv, None  # type: ignore[assignment]
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock = True, threading.Lock()
        with open(pipe, "w") as file:
            file.write(json.dumps(environment))


def fork_rank_1() -> None:
    """Fork rank 1, which comes to life when Lightning starts it, and ends with rank 0 if that never comes."""
    from lightning.pytorch.strategies.launchers import subprocess_script

    reading, writing = os.pipe()
    if pid := os.fork():
        os.close(reading)
        launched = SimpleNamespace(Popen=lambda command, env, cwd: Rank1(pid, writing, env))
        subprocess_script.subprocess = launched  # type: ignore[assignment]
        return
    os.close(writing)
    with open(reading) as file:
        environment = file.read()
    if not environment:
        os._exit(0)
    os.environ.clear()
    os.environ.update(json.loads(environment))
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(RANK_1)


if __name__ == "__main__":
    main()
