"""Say in one line what takes long, before it begins."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities import rank_zero_only

from rlt_lightning.models.embedded import resolve
from rlt_lightning.models.weights import full_shape

LARGE_BYTES = 10**9  # smaller weights are checked and written within a second or two
LARGE_FILE_BYTES = 5 * 10**7
COUNT_EVERY_S = 10.0
T = TypeVar("T")


@rank_zero_only
def announce(line: str) -> None:
    """Print a line to the standard error stream, above a progress bar if there is one; on rank 0 only."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


def announce_model(name: str, dtype: str, role: str = "") -> None:
    """Say which model is loaded next, the size of its files and, if there is a choice, what it is for."""
    as_dtype = "" if dtype == "auto" else f" as {dtype}"
    announce(f"loading {name} ({model_size(name)}){as_dtype}{role and f': {role}'}")


def announce_slow_bfloat16(device: torch.device, types: dict[str, str]) -> None:
    """Say which settings make a CPU compute in bfloat16 that has no instructions for it.

    Args:
        device: The device that computes.
        types: The values of the settings that choose a type, by name.
    """
    found = [name for name, value in types.items() if value.startswith("bf")]
    if device.type == "cpu" and found and not cpu_has_bfloat16():
        advice = [f"{name} to {'32-true' if name == 'trainer.precision' else 'float32'}" for name in found]
        announce(
            "This CPU has no bfloat16 instructions (AVX512-BF16, AMX): float32 is several times faster. "
            f"Set {' and '.join(advice)}."
        )


def cpu_has_bfloat16() -> bool:
    """Return whether this CPU multiplies in bfloat16; True for processors other than x86."""
    found = torch.cpu.get_capabilities()
    return found.get("architecture") != "x86_64" or bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def announce_check(name: str, model: Any) -> None:
    """Say that a model's log-probs are checked next, if the model is large."""
    if (num_bytes := weights_size(model.parameters())) > LARGE_BYTES:
        announce(f"checking the log-probs of packed rows of {name} ({size_text(num_bytes)})")


def announce_writing(path: Path, num_bytes: int) -> None:
    """Say that a checkpoint or a model folder is written next, if it is large."""
    if num_bytes > LARGE_BYTES:
        announce(f"writing {path} ({size_text(num_bytes)})")


def announce_reading(path: Path) -> None:
    """Say that a file of rows, or the folder of a checkpoint, is read next, if it is large."""
    files = path.rglob("*.safetensors") if path.is_dir() else [path]
    num_bytes = sum(file.stat().st_size for file in files)
    if num_bytes > (LARGE_BYTES if path.is_dir() else LARGE_FILE_BYTES):
        announce(f"reading {path} ({size_text(num_bytes)})")


def counted(rows: Iterable[T], what: str) -> Iterator[T]:
    """Yield rows as they are read, and say every few seconds how many are done."""
    said_at = time.monotonic()
    for number, row in enumerate(rows):
        if time.monotonic() > said_at + COUNT_EVERY_S:
            announce(f"{what}: {number:,} rows so far")
            said_at = time.monotonic()
        yield row


def model_size(name: str) -> str:
    """Return the size of a model's files, for a message, or that they are fetched first."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    folder = Path(resolve(name))
    if not folder.is_dir():
        try:
            config = try_to_load_from_cache(name, "config.json")
        except HFValidationError:  # neither a folder nor the name of a model on the hub
            return "of unknown size"
        folder = Path(config).parent if isinstance(config, str) else folder
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return size_text(num_bytes) if num_bytes else "its files are fetched from the Hugging Face hub first"


def weights_size(tensors: Iterable[Any], dtype: torch.dtype | None = None) -> int:
    """Return the bytes of tensors, each counted whole even where it is sharded.

    Args:
        tensors: The tensors.
        dtype: Data type that they are converted to; None: they stay as they are.
    """
    return sum(torch.Size(full_shape(t)).numel() * (dtype or t.dtype).itemsize for t in tensors)


def size_text(num_bytes: int) -> str:
    """Return a number of bytes as MB, or as GB from one GB on."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def has_styles() -> bool:
    """Return whether standard output is a terminal with colours that the user has not switched off."""
    allowed = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return sys.stdout.isatty() and allowed
