"""Load the pretended GPU's library; import this before torch, which looks for CUDA only once."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from typing import Any

from pretended_gpu.build import MODULE, kernels_file, library, torch_folder

# What the library needs, in the order in which `import torch` would load it.
NEEDED = ("libgomp.so.1", "libc10.so", "libtorch_cpu.so", "libtorch.so", "libshm.so", "libtorch_python.so")


def load() -> Any:
    """Register the device, import torch, and return the library as a module.

    Raises:
        ImportError: If torch is there already.
    """
    if "torch" in sys.modules:
        raise ImportError("pretended_gpu must be imported before torch")
    path = library()
    for name in NEEDED:
        if (torch_folder() / "lib" / name).exists():
            ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401

    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.set_cuda_kernels(set(json.loads(kernels_file(path).read_text())))
    return module


ext = load()
