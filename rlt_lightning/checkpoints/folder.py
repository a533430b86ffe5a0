"""One kind of checkpoint for every strategy: whole tensors by name, whatever shards they came from.

    step=000006.ckpt/
      state.pt       loops, schedule, callbacks, data position, optimizer settings: plain values only
      weights/       safetensors of the trained parameters, as from_pretrained reads them
      exp_avg/ …     safetensors of each of the optimizer's moments, by the parameters' names

So a run goes on with another number of processes or another strategy, and an export copies files. A folder
has its final name only when everything in it is on the disk.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from rlt_lightning.models.weights import NamedTensor, write_weights
from rlt_lightning.types import InputError

STATE, WEIGHTS, BEST = "state.pt", "weights", "best.json"


class Alone:
    """Stands for a strategy where one process does the work."""

    global_rank, world_size = 0, 1

    def barrier(self) -> None:
        """Wait for nobody."""


ALONE = Alone()


def write_checkpoint(
    folder: Path, state: dict[str, Any], tensors: dict[str, list[NamedTensor]], strategy: Any = ALONE
) -> None:
    """Write a checkpoint; all ranks of the strategy meet, and each writes its share of the files.

    Args:
        folder: Its final name.
        state: Plain values and small tensors; those of rank 0 are written.
        tensors: By sub-folder; they may be sharded.
        strategy: Whose ranks these are.
    """
    with whole_or_absent(folder, strategy) as scratch:
        for name, named_tensors in tensors.items():
            (scratch / name).mkdir(exist_ok=True)
            write_weights(named_tensors, scratch / name, strategy.global_rank, strategy.world_size)
        if strategy.global_rank == 0:
            with open(scratch / STATE, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())


@contextmanager
def whole_or_absent(folder: Path, strategy: Any) -> Iterator[Path]:
    """A scratch folder that takes its final name once the block is done on all ranks, which meet."""
    scratch = folder.with_name(folder.name + ".tmp")
    if strategy.global_rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    strategy.barrier()
    yield scratch
    strategy.barrier()
    if strategy.global_rank == 0:
        discard(folder)
        os.replace(scratch, folder)
        sync_folder(folder.parent)
    strategy.barrier()


def read_state(folder: Path) -> dict[str, Any]:
    """Read the plain part of a checkpoint; it cannot run code.

    Raises:
        InputError: If it is not one that rlt wrote.
    """
    try:
        if zipfile.is_zipfile(folder / STATE):  # else an old format's reader would be let loose on it
            state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
            if isinstance(state, dict) and "model" in state:
                return state
        problem: Exception | None = None
    except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
        problem = error
    raise InputError(
        f"The checkpoint {folder} must be one that rlt wrote, but cannot be read. Choose another."
    ) from problem


def discard(folder: Path) -> None:
    """Delete a checkpoint; a crash in between leaves nothing that looks like one."""
    if folder.exists():
        doomed = folder.with_name(folder.name + ".old")
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(folder, doomed)
        (doomed / STATE).unlink(missing_ok=True)  # from here on it is none
        shutil.rmtree(doomed, ignore_errors=True)  # another process may take it back for a moment


def discard_unfinished(folder: Path) -> None:
    """Delete what a crash left half written or half deleted."""
    for suffix in (".tmp", ".old"):
        for path in folder.glob(f"step=*.ckpt{suffix}"):
            shutil.rmtree(path)


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
