"""Check that everything that a run imports is installed; note versions, driver and memory."""

from __future__ import annotations

import importlib
import platform
import subprocess
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
from findings import note

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "lightning",
    "peft",
    "deepspeed",
    "liger-kernel",
    "cut-cross-entropy",
)
# What a run of these checks needs, and what it can do without.
NEEDED = (
    "rlt_lightning.cli",
    "rlt_lightning.strategies",
    "accelerate",
    "gguf",
    "math_verify",
    "peft",
    "tensorboard",
)
WISHED = ("deepspeed", "liger_kernel", "cut_cross_entropy", "pytest", "pyarrow")


def installed_version(package: str) -> str | None:
    """Return a package's version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def import_error(module: str) -> str | None:
    """Return why a module cannot be imported, or None."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a package that is half there raises errors of any class
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    found: dict[str, object] = {name: installed_version(name) for name in PACKAGES}
    found |= {"python": platform.python_version(), "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
        query = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
        found["driver"] = subprocess.run(query, shell=True, capture_output=True, text=True).stdout.strip()
    errors = {name: reason for name in (*NEEDED, *WISHED) if (reason := import_error(name))}
    if not set(errors) & set(NEEDED):
        # All runs of call 1 need these products, whose types PyTorch only checks on a GPU.
        from numerics import HALF, attempt, log_probs

        attempt("head's products, half", partial(log_probs, HALF, 64, bias=True))
    note("versions", not set(errors) & set(NEEDED), **found, missing=errors)
    raise SystemExit(bool(set(errors) & set(NEEDED)))


if __name__ == "__main__":
    main()
