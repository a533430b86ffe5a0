"""Find a checkpoint of a run: the last finished one, or the best by validation."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlt_lightning.checkpoints.folder import BEST, STATE, sync_folder
from rlt_lightning.types import InputError


def recover(folder: Path) -> None:
    """Restore the name of a checkpoint that was about to be replaced by another one of the same step."""
    for doomed in folder.glob("step=*.ckpt.old"):
        if (doomed / STATE).exists() and not doomed.with_suffix("").exists():
            with suppress(OSError):  # another process was faster
                os.replace(doomed, doomed.with_suffix(""))


def checkpoints_in(folder: Path) -> list[Path]:
    """Return all finished checkpoints in the order of their steps; half-written ones have another suffix."""
    recover(folder)
    # The length comes first, so that step 1000000 follows step 999999.
    return sorted(folder.glob("step=*.ckpt"), key=lambda path: (len(path.name), path.name))


def newest_checkpoint(folder: Path) -> Path:
    """Return the checkpoint with the largest step.

    Raises:
        InputError: If there is none.
    """
    if not (found := checkpoints_in(folder)):
        raise InputError(
            f"--ckpt_path last needs a checkpoint in {folder}, but there is none: the run stopped before its "
            "first one. Start it again with --overwrite true."
        )
    return found[-1]


def best_checkpoint(folder: Path) -> Path:
    """Return the checkpoint with the best score.

    Raises:
        InputError: If no checkpoint was scored, or the best one is missing.
    """
    recover(folder)
    best = read_best(folder)
    if not best:
        raise InputError(
            f"--ckpt_path best needs a checkpoint with a score, but {folder} has none. Train with "
            "--checkpoint.monitor reward/val_mean and held-out rows (data.val_rows), or choose last."
        )
    path: Path = folder / best["checkpoint"]
    if not path.exists():
        raise InputError(f"--ckpt_path best is {path}, but that is missing. Restore it, or choose last.")
    return path


def read_best(folder: Path) -> dict[str, Any]:
    """Return best.json: checkpoint, step, monitor and score; empty if there is no such file."""
    path = folder / BEST
    try:
        best: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return best
    except ValueError as error:
        raise InputError(f"{path} must be a file that rlt wrote, but cannot be read. Delete it.") from error


def write_best(folder: Path, best: dict[str, Any]) -> None:
    """Write best.json completely or not at all."""
    scratch = folder / f"{BEST}.tmp"
    with open(scratch, "w") as file:
        json.dump(best, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, folder / BEST)
    sync_folder(folder)


def checkpoint_of(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step={step:06d}.ckpt"


# The words that --ckpt_path takes besides a path.
CHECKPOINT_CHOICES = {"last": newest_checkpoint, "best": best_checkpoint}
