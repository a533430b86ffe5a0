"""Compile device.cpp, and list PyTorch's CUDA kernels, once for an environment and a version of PyTorch."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
MODULE = "pretended_cuda"
# torch_python is not on the list: Python has loaded it when the module is imported.
LIBRARIES = ("torch", "torch_cpu", "torch_python", "c10")


class CannotBuild(Exception):
    """There is no compiler, or it failed."""


def torch_folder() -> Path:
    """Return the folder of PyTorch, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def library() -> Path:
    """Return the compiled library, which lies in the environment; its file of kernels lies beside it.

    Raises:
        CannotBuild: If there is no g++, or if it fails.
    """
    text = SOURCE.read_bytes() + version("torch").encode() + sys.version.encode()
    folder = Path(sys.prefix) / "pretended_gpu" / hashlib.sha256(text).hexdigest()[:16]
    path = folder / f"{MODULE}.so"
    if path.exists():
        return path
    if shutil.which("g++") is None:
        raise CannotBuild("the pretended GPU needs g++")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of another process that builds it at this moment
        if not path.exists():
            kernels_file(path).write_text(json.dumps(list_cuda_kernels()))
            compile_to(path)
    return path


def kernels_file(library: Path) -> Path:
    """Return the file beside the library that lists the operators with a CUDA kernel."""
    return library.with_name("kernels.json")


def compile_to(path: Path) -> None:
    """Compile the library: less than a minute on one core."""
    torch = torch_folder()
    scratch = path.with_suffix(".new")
    include = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    defined = [f"TORCH_EXTENSION_NAME={MODULE}", "TORCH_API_INCLUDE_EXTENSION_H"]
    defined += ["USE_DISTRIBUTED", "USE_C10D_GLOO"]
    command = ["g++", "-std=c++20", "-O0", "-w", "-fPIC", "-shared", *(f"-D{name}" for name in defined)]
    command += [*(f"-I{folder}" for folder in include), str(SOURCE), "-o", str(scratch)]
    command += [f"-L{torch / 'lib'}", *(f"-l{name}" for name in LIBRARIES), f"-Wl,-rpath,{torch / 'lib'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CannotBuild(f"g++ could not compile the pretended GPU:\n{done.stderr[-3000:]}")
    scratch.rename(path)  # appears whole


def list_cuda_kernels() -> list[str]:
    """Return the operators that a CUDA build of this PyTorch has a kernel for, by its own list."""
    import torchgen
    from torchgen.gen import get_grouped_native_functions, parse_native_yaml
    from torchgen.model import DispatchKey, NativeFunctionsGroup

    folder = Path(torchgen.__file__).parent / "packaged/ATen/native"
    parsed = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    kernels = parsed.backend_indices[DispatchKey.CUDA]
    names = set()
    for group in get_grouped_native_functions(parsed.native_functions):
        together = isinstance(group, NativeFunctionsGroup)
        whole = together and group.structured and kernels.has_kernel(group)
        for function in group.functions() if together else [group]:
            if whole or kernels.has_kernel(function):
                names.add(f"aten::{function.func.name}")
    return sorted(names)
