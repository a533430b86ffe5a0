"""One checkpoint format for every strategy: whole tensors stored by name, however they were sharded.

    step=000006.ckpt/
      state.pt       loops, schedule, callbacks, data position, optimizer settings: plain values only
      weights/       safetensors of the trained parameters, as from_pretrained reads them
      exp_avg/ …     safetensors of each of the optimizer's moments, by the parameters' names
      rank0.xxh128   digests of the files that rank 0 wrote; each other rank that wrote some has such a file

So a run can resume with another number of processes or another strategy, and an export copies files. A folder
gets its final name only when everything in it is on the disk. The order of a save, where | is a barrier at
which all ranks wait for each other:

    rank 0       | make step=6.ckpt.tmp |  weights, moments: its files, then state.pt  | rename .tmp, fsync  |
                 |                      |  (every tensor is gathered from all ranks)   |                     |
    other ranks  |        wait          |  weights, moments: their files               |        wait         |
    every rank   |                      |  last: the digests of the files it wrote     |                     |

These parts of a run, called by Lightning, put their state into state.pt and read it back on resume:

    loops, schedules          Lightning
    position in the data      StepLoader.state_dict                      datamodules/loader.py
    model, settings, format,  PolicyModule.on_save_checkpoint            modules/policy.py
    hashes of the rows
    completions in flight     RolloutCallback.state_dict                 callbacks/rollout.py
    moves of the reference    ReferenceSync.state_dict                   callbacks/reference.py

`load_checkpoint` in checkpoints/io.py restores weights and moments: that of FolderCheckpointIO if weights are
whole, that of NamedCheckpoints if they are sharded.

What a resumed run finds elsewhere, and checkpoints therefore leave out:

    weights of the reference  reference/step=000006 of the run folder    ReferenceSync.on_train_start
    earlier rows of files     metrics.csv and rollouts.jsonl, cut to     Checkpoint.on_train_start,
                              the checkpoint's step                      RolloutRecorder.on_train_start
    random numbers            functions of seed, step and rank, or of    PolicyModule.on_train_batch_start,
                              seed, step and row                         Sampler in rollouts/sampler.py

A crash before the rename leaves a .tmp, which the next run deletes. A checkpoint of the same step is renamed
to .old before the rename and deleted after it. After a crash in between `recover` restores its name.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlt_lightning.run.digests import require_digests, write_digests
from rlt_lightning.types import InputError

# Who only looks for checkpoints needs no PyTorch: the first line of `rlt demo` appears at once.
if TYPE_CHECKING:
    from rlt_lightning.models.weights import NamedTensor

STATE, WEIGHTS = "state.pt", "weights"
DAMAGED = "Resume from another checkpoint (--ckpt_path), or restore this one from a copy."


# The part of a strategy that writing needs, for a single process.
ONE_PROCESS = SimpleNamespace(global_rank=0, world_size=1, barrier=lambda: None)


def write_checkpoint(
    folder: Path, state: dict[str, Any], tensors: dict[str, list[NamedTensor]], strategy: Any = ONE_PROCESS
) -> None:
    """Write a checkpoint; all ranks must call this together, and each writes its share of the files.

    Args:
        folder: The checkpoint's final name.
        state: Plain values and small tensors; only rank 0 writes them.
        tensors: Named tensors by sub-folder; they may be sharded.
        strategy: The strategy whose ranks write.
    """
    import torch

    from rlt_lightning.models.weights import write_weights

    with replace_folder(folder, strategy) as scratch:
        written = []
        for name, named_tensors in tensors.items():
            (scratch / name).mkdir(exist_ok=True)
            written += write_weights(named_tensors, scratch / name, strategy.global_rank, strategy.world_size)
        if strategy.global_rank == 0:
            with open(scratch / STATE, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            written.append(scratch / STATE)
        if written:
            write_digests(scratch, written, strategy.global_rank)


@contextmanager
def replace_folder(folder: Path, strategy: Any) -> Iterator[Path]:
    """Yield a scratch folder, which gets its final name when the block has ended on all ranks."""
    scratch = folder.with_name(folder.name + ".tmp")
    if strategy.global_rank == 0:
        remove(scratch)
        scratch.mkdir(parents=True)
    strategy.barrier()
    try:
        yield scratch
    except Exception:
        if strategy.world_size == 1:  # other ranks may still write there
            remove(scratch)
        raise
    strategy.barrier()
    if strategy.global_rank == 0:
        before = folder.with_name(folder.name + ".old")
        if folder.exists() or folder.is_symlink():
            set_aside(folder)
        try:
            os.replace(scratch, folder)
        except OSError:  # a process that looked for checkpoints has restored the old one
            set_aside(folder)
            os.replace(scratch, folder)
        sync_folder(folder.parent)
        delete(before)
    strategy.barrier()


def read_state(folder: Path) -> dict[str, Any]:
    """Return the plain values of a checkpoint; reading them cannot run code.

    Raises:
        InputError: If rlt did not write this checkpoint, or these values were damaged since.
    """
    import torch

    try:
        # torch.load would read another file by its old format.
        if zipfile.is_zipfile(folder / STATE):
            require_digests(folder, DAMAGED, [STATE])
            state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
            if isinstance(state, dict) and "model" in state:
                return state
        problem: Exception | None = None
    except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
        problem = error
    raise InputError(
        f"The checkpoint {folder} must be one that rlt wrote, but cannot be read. Choose another."
    ) from problem


def read_whole_state(folder: Path) -> dict[str, Any]:
    """Check all files of a checkpoint, whose weights are read next, and return its plain values.

    Raises:
        InputError: Also if weights or moments were damaged, or are those of another checkpoint.
    """
    state = read_state(folder)
    require_digests(folder, DAMAGED)
    return state


def discard(folder: Path) -> None:
    """Delete a checkpoint. A crash meanwhile leaves a .old folder: a whole checkpoint, or none at all."""
    if folder.exists() or folder.is_symlink():
        delete(set_aside(folder))


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint to .old, from which `recover` restores it; return the new path."""
    aside = folder.with_name(folder.name + ".old")
    remove(aside)
    os.replace(folder, aside)
    return aside


def delete(aside: Path) -> None:
    """Delete a checkpoint that is set aside, its state first: without it the folder is no checkpoint."""
    if not aside.is_symlink():
        (aside / STATE).unlink(missing_ok=True)
    remove(aside)


def remove(folder: Path) -> None:
    """Delete a folder, or only the link if it is one. Another process may have deleted it already."""
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def discard_unfinished(folder: Path) -> None:
    """Delete checkpoints that a crash left half written or half deleted."""
    for suffix in (".tmp", ".old"):
        for path in folder.glob(f"step=*.ckpt{suffix}"):
            remove(path)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def recover(folder: Path) -> None:
    """Restore the name of a checkpoint that was about to be replaced by another one of the same step."""
    for doomed in folder.glob("step=*.ckpt.old"):
        if (doomed / STATE).exists() and not doomed.with_suffix("").exists():
            with suppress(OSError):  # another process was faster
                os.replace(doomed, doomed.with_suffix(""))


def list_checkpoints(folder: Path) -> list[Path]:
    """Return all finished checkpoints in the order of their steps; half-written ones have another suffix."""
    recover(folder)
    # The length comes first, so that step 1000000 follows step 999999.
    return sorted(folder.glob("step=*.ckpt"), key=lambda path: (len(path.name), path.name))


def find_checkpoint(path: Path) -> Path:
    """Return a checkpoint, or the newest one of a run's folder or of its `checkpoints`.

    Raises:
        InputError: If there is none.
    """
    if (path / STATE).exists():
        return path
    if not (checkpoints := list_checkpoints(path / "checkpoints") or list_checkpoints(path)):
        raise InputError(
            f"--ckpt_path must be a checkpoint, or a run's folder with one, but {path} has none. The "
            "model of a run that has ended is in its folder model/; --overwrite true starts a run again."
        )
    return checkpoints[-1]


def name_checkpoint(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step={step:06d}.ckpt"
