"""Start `vllm serve` as a child process, on its GPUs, and stop it on every exit path.

    this process ──── start_server ────────▶ guard.py ───▶ vllm serve ───▶ its model workers
         └── a pipe, closed when this process ends ──▶ guard ends them all

CUDA_VISIBLE_DEVICES, where it is set, names the GPUs of the machine that a process may use, by number or
UUID. PyTorch and Lightning count among these from 0. So does `launch.gpus`:

    CUDA_VISIBLE_DEVICES=4,5,6,7   trainer.devices: 2      trains on 4 and 5
                                   launch.gpus: [[2], [3]] workers sample on 6 and 7
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which

import torch

from rlt_lightning.engines import guard
from rlt_lightning.run.allocator import ALLOCATOR_NAMES
from rlt_lightning.run.console import make_printable, waiting_for
from rlt_lightning.types import InputError
from rlt_lightning.worker.gloo import LOOPBACK

EXTENSION = "rlt_lightning.worker.vllm.WorkerExtension"
# The head's products stay in float32, as the trainer's do: vLLM would round them to the type of the weights.
FLOAT32_LOGITS = ["--hf-overrides", '{"head_dtype": "float32"}']
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
            if torch.cuda.is_available():  # without CUDA vLLM would copy the whole head for it at every token
                words += FLOAT32_LOGITS
        for name in ("max_model_len", "tensor_parallel_size", "data_parallel_size"):
            value = getattr(self, name)
            if value not in (None, 1):
                words += [f"--{name.replace('_', '-')}", str(value)]
        return words + self.arguments

    def build_gpu_environment(self, index: int) -> dict[str, str]:
        """Return the environment variable by which worker number `index` sees only its GPUs."""
        return {} if self.gpus is None else {VARIABLE: choose_worker_gpus(self.gpus[index], os.environ)}


def find_executable(name: str) -> str | None:
    """Return the path of a command beside this Python or on PATH; None if there is none."""
    beside = str(Path(sys.executable).parent)
    return which(name, path=os.pathsep.join([beside, os.environ.get("PATH", "")]))


def start_server(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a `vllm serve` process and say so. It ends with this process, however that ends.

    Args:
        command: Its command line.
        environment: Further environment variables.
        log: File to which its output is appended.
    """
    words = " ".join([Path(command[0]).name, *command[1:3]])
    print(f"starting `{words}` (log: {log})", file=sys.stderr, flush=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
        # vLLM imports FlashInfer if its sampler is on, and ends where it is missing; with a seed for each
        # request it never samples by it.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # vLLM's groups listen on the machine's address otherwise, whatever --host says.
        "VLLM_HOST_IP": LOOPBACK,
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    inherited = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_NAMES}
    with open(log, "ab") as file:
        return subprocess.Popen(
            [sys.executable, guard.__file__, *command],
            stdin=subprocess.PIPE,  # closes when this process ends, which the guard sees
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**inherited, **defaults, **environment},
            start_new_session=True,  # Ctrl-C must reach only the trainer
        )


def stop_server(process: subprocess.Popen[bytes] | None) -> None:
    """Ask a process to end with all that it has started, and kill it if it does not; safe to call twice."""
    if process is None:
        return
    assert process.stdin is not None
    process.stdin.close()
    with waiting_for("a vLLM worker to end"), contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(guard.GRACE_S + 2)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_last_error(log: Path) -> str:
    """Return the last line of a log that names an error, or else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return f"{make_printable((errors or lines or ['its log is empty'])[-1][-300:])} (log: {log})."


def choose_worker_gpus(gpus: list[int], environment: Mapping[str, str]) -> str:
    """Return a worker's CUDA_VISIBLE_DEVICES.

    Args:
        gpus: Positions among the GPUs that this process sees.
        environment: The environment variables of this process.

    Raises:
        InputError: If a position is beyond the GPUs that this process sees.
    """
    # Without a GPU in sight, as in a test, nothing is known of the named ones.
    seen = environment.get(VARIABLE, ",".join(map(str, range(torch.cuda.device_count() or max(gpus) + 1))))
    visible = [word.strip() for word in seen.split(",") if word.strip()]
    if beyond := [i for i in gpus if not 0 <= i < len(visible)]:
        raise InputError(
            f"launch.gpus must count, from 0, among the {len(visible)} GPUs that this process sees, but "
            f"names {beyond[0]}. Correct it, or {VARIABLE}."
        )
    return ",".join(visible[i] for i in gpus)


def find_free_port(host: str = LOOPBACK) -> int:
    """Return a port that nobody listens on."""
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
