"""Start `vllm serve` as a child process, on GPUs of its own, and stop it on every exit path.

    this process ──── LocalServer.start ───▶ guard.py ───▶ vllm serve ───▶ its model workers
         └── a pipe, closed when this process ends ──▶ guard ends them all

CUDA_VISIBLE_DEVICES, where it is set, names the GPUs of the machine that a process may use, by number or
UUID. PyTorch and Lightning count among these from 0. So does `launch.gpus`:

    CUDA_VISIBLE_DEVICES=4,5,6,7   trainer.devices: 2      trains on 4 and 5
                                   launch.gpus: [[2], [3]] workers sample on 6 and 7
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which

import torch

from rlt_lightning.allocator import ALLOCATOR_NAMES
from rlt_lightning.console import make_printable, waiting_for
from rlt_lightning.engines import guard
from rlt_lightning.gloo import LOOPBACK
from rlt_lightning.types import InputError

EXTENSION = "rlt_lightning.vllm_worker.WorkerExtension"
VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Launch:
    """The workers that a run starts for itself.

    Args:
        executable: vLLM's command: a path, or a name beside this Python or on PATH.
        num_workers: Servers to start, each with a copy of the teacher.
        model: What they load at first; None: the teacher. The trainer's weights replace it before the first
            request, unless the engine's push is NoPush.
        dtype: Data type of the worker's weights.
        max_model_len: Tokens of prompt and completion; None: as many as the model allows.
        tensor_parallel_size: GPUs that share one copy of the weights.
        data_parallel_size: Copies behind one server.
        gpus: GPUs of each worker, one list per worker, counted from 0 among the GPUs that this process
            sees (CUDA_VISIBLE_DEVICES); None: each worker sees all of them.
        port: Port of the first worker, the others follow; 0: free ports.
        start_deadline_s: Time to load the model and answer.
        arguments: Further arguments of `vllm serve`, such as --enforce-eager.
        environment: Further environment variables, such as VLLM_CPU_KVCACHE_SPACE.
    """

    executable: str = "vllm"
    num_workers: int = 1
    model: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    gpus: list[list[int]] | None = None
    port: int = 0
    start_deadline_s: float = 900.0
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = (self.num_workers, self.tensor_parallel_size, self.data_parallel_size)
        if min(sizes) < 1:
            raise InputError(
                "launch.num_workers, tensor_parallel_size and data_parallel_size must be at least 1, but are "
                f"{sizes}. Correct them."
            )
        needed = self.tensor_parallel_size * self.data_parallel_size
        if self.gpus is not None and [len(ids) for ids in self.gpus] != [needed] * self.num_workers:
            raise InputError(
                f"launch.gpus must name {needed} GPU(s) for each of the {self.num_workers} worker(s), but is "
                f"{self.gpus}. Correct it, or the sizes."
            )

    def build_command(
        self, index: int, port: int, model: str, backend: str | None, served_model: str
    ) -> list[str]:
        """Return the command line of worker number `index`, which a person could type as well."""
        program = find_executable(self.executable)
        if program is None:
            raise InputError(
                f"launch.executable must be vLLM's command, but '{self.executable}' is none. Install the "
                "extra vllm (on a CPU: make setup-vllm), or correct the path."
            )
        words = [program, "serve", self.model or model, "--served-model-name", served_model]
        words += ["--host", LOOPBACK, "--port", str(port), "--dtype", self.dtype, "--seed", str(index)]
        words += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        if backend is not None:
            words += ["--weight-transfer-config", f'{{"backend": "{backend}"}}']
            words += ["--worker-extension-cls", EXTENSION]
        for name in ("max_model_len", "tensor_parallel_size", "data_parallel_size"):
            value = getattr(self, name)
            if value not in (None, 1):
                words += [f"--{name.replace('_', '-')}", str(value)]
        return words + self.arguments

    def build_gpu_environment(self, index: int) -> dict[str, str]:
        """Return the environment variable by which worker number `index` sees only its GPUs."""
        if self.gpus is None:
            return {}
        # None: where the trainer sees no GPU, workers may.
        number = torch.cuda.device_count() or None
        return {VARIABLE: choose_worker_gpus(self.gpus[index], os.environ, number)}


def find_executable(name: str) -> str | None:
    """Return the path of a command beside this Python or on PATH; None if there is none."""
    beside = str(Path(sys.executable).parent)
    return which(name, path=os.pathsep.join([beside, os.environ.get("PATH", "")]))


class LocalServer:
    """A `vllm serve` process. It ends with this process, however that ends.

    Args:
        command: Its command line.
        environment: Further environment variables.
        log: File for its output.
        dev_mode: Whether it has the routes of VLLM_SERVER_DEV_MODE.
        size: Size of the model that it loads, for the line that says so.
    """

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        log: Path,
        dev_mode: bool = True,
        size: str = "of unknown size",
    ) -> None:
        self.command = command
        self.dev_mode = dev_mode
        self.size = size
        self.environment = environment
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.log_begin = 0  # bytes in the log before the last start
        atexit.register(self.stop)

    def start(self) -> None:
        """Start the process, or start it again, and say so."""
        self.kill()
        words = " ".join([Path(self.command[0]).name, *self.command[1:3]])
        print(f"starting `{words}` ({self.size}; log: {self.log})", file=sys.stderr, flush=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        defaults = {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
        defaults["VLLM_SERVER_DEV_MODE"] = "1" if self.dev_mode else "0"
        # vLLM imports FlashInfer if its sampler is on, and ends where it is missing; with a seed for each
        # request it never samples by it.
        defaults["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        # vLLM's own groups listen on the machine's address otherwise, whatever --host says.
        defaults |= {
            "VLLM_HOST_IP": LOOPBACK,
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        }
        inherited = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_NAMES}
        environment = {**inherited, **defaults, **self.environment}
        with open(self.log, "ab") as log:
            self.log_begin = log.tell()
            self.process = subprocess.Popen(
                [sys.executable, guard.__file__, *self.command],
                stdin=subprocess.PIPE,  # closes when this process ends, which the guard sees
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C must reach only the trainer
            )

    def find_error(self) -> str | None:
        """Return the error that the process ended with; None while it runs."""
        if self.process is None or self.process.poll() is None:
            return None
        return f"{self.read_last_words()} (log: {self.log})"

    def read_last_words(self) -> str:
        """Return the last line of its log that names an error, or else the last line."""
        text = self.log.read_bytes()[self.log_begin :].decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return make_printable((errors or lines or ["its log is empty"])[-1][-300:])

    def kill(self) -> None:
        """End the process at once, with all that it has started."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._close_pipe()
        self.process = None

    def stop(self) -> None:
        """Ask the process to end, and kill it if it does not; safe to call twice."""
        if self.process is not None:
            self._close_pipe()
            with waiting_for("a vLLM worker to end"), contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(guard.GRACE_S + 2)
            self.kill()
        atexit.unregister(self.stop)

    def _close_pipe(self) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.close()


def read_visible_gpus(environment: Mapping[str, str]) -> list[str] | None:
    """Return the names of the GPUs that the environment shows; None if it shows all.

    CUDA reads the list up to its first entry that is no GPU, such as -1.

    Raises:
        InputError: If an entry occurs twice: CUDA would then show none at all.
    """
    if VARIABLE not in environment:
        return None
    names: list[str] = []
    for word in environment[VARIABLE].split(","):
        name = word.strip()
        if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", name):
            break
        if name in names:
            raise InputError(
                f"{VARIABLE} must name each GPU once, but names {name} twice: "
                f"'{environment[VARIABLE]}'. Correct it."
            )
        names.append(name)
    return names


def choose_worker_gpus(gpus: list[int], environment: Mapping[str, str], number: int | None = None) -> str:
    """Return a worker's CUDA_VISIBLE_DEVICES.

    Args:
        gpus: Positions among the GPUs that this process sees.
        environment: The environment variables of this process.
        number: The machine's number of GPUs, read if the environment shows all; None: unknown.

    Raises:
        InputError: If a position is beyond the GPUs that this process sees.
    """
    visible = read_visible_gpus(environment)
    if visible is None:
        visible = [str(i) for i in range(max(gpus) + 1 if number is None else number)]
        shown = "the machine has"
    else:
        shown = f"{VARIABLE}='{environment[VARIABLE]}' shows"
    if beyond := [i for i in gpus if not 0 <= i < len(visible)]:
        raise InputError(
            f"launch.gpus must count, from 0, among the GPUs that this process sees, but names {beyond[0]}, "
            f"and {shown} {len(visible)}. Correct it, or show the process more GPUs."
        )
    return ",".join(visible[i] for i in gpus)


def find_free_port(host: str = LOOPBACK) -> int:
    """Return a port that nobody listens on."""
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
