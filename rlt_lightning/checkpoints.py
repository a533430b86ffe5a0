"""One kind of checkpoint for every strategy: whole tensors by name, whatever shards they came from.

    step=000006.ckpt/
      state.pt       loops, schedule, callbacks, data position, optimizer settings: plain values only
      weights/       safetensors of the trained parameters, as from_pretrained reads them
      exp_avg/ …     safetensors of each of the optimizer's moments, by the parameters' names

So a run goes on with another number of processes or another strategy, and an export copies files. A folder
has its final name only when everything in it is on the disk.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor
from typing_extensions import override

from rlt_lightning.models.weights import NamedTensor, WeightFiles, write_weights
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


def recover(folder: Path) -> None:
    """Give back the name of a checkpoint that was about to be replaced by another of its step."""
    for doomed in folder.glob("step=*.ckpt.old"):
        if (doomed / STATE).exists() and not doomed.with_suffix("").exists():
            with suppress(FileNotFoundError):  # another rank was faster
                os.replace(doomed, doomed.with_suffix(""))


def checkpoints_in(folder: Path) -> list[Path]:
    """All checkpoints by step. Half-written ones have another suffix: never among them."""
    recover(folder)
    return sorted(folder.glob("step=*.ckpt"), key=lambda path: (len(path.name), path.name))  # by number


def newest_checkpoint(folder: Path) -> Path:
    """Return the checkpoint with the largest step.

    Raises:
        InputError: If there is none.
    """
    if not (found := checkpoints_in(folder)):
        raise InputError(
            f"--ckpt_path last needs a checkpoint in {folder}, but there is none: the run stopped before its "
            "first. Start it again with --overwrite true."
        )
    return found[-1]


def best_checkpoint(folder: Path) -> Path:
    """Return the checkpoint with the best score.

    Raises:
        InputError: If none was scored, or it is gone.
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
        raise InputError(f"--ckpt_path best is {path}, but it is gone. Restore it, or choose last.")
    return path


def read_best(folder: Path) -> dict[str, Any]:
    """What best.json holds: checkpoint, step, monitor and score; nothing if it is not there."""
    path = folder / BEST
    try:
        best: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return best
    except ValueError as error:
        raise InputError(f"{path} must be what rlt wrote, but cannot be read. Delete it.") from error


def write_best(folder: Path, best: dict[str, Any]) -> None:
    """Write best.json, whole or not at all."""
    scratch = folder / f"{BEST}.tmp"
    with open(scratch, "w") as file:
        json.dump(best, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, folder / BEST)
    sync_folder(folder)


def checkpoint_of(step: int) -> str:
    """Name of a step's checkpoint."""
    return f"step={step:06d}.ckpt"


CHOICES = {"last": newest_checkpoint, "best": best_checkpoint}  # of --ckpt_path


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


class FolderCheckpointIO(TorchCheckpointIO):
    """Checkpoints of strategies that hold everything whole: one process, or DDP."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        state = dict(checkpoint)
        weights: dict[str, Tensor] = state.pop("state_dict")
        first: dict[int, str] = {}
        aliases = {name: first.setdefault(tensor.data_ptr(), name) for name, tensor in weights.items()}
        tensors = {WEIGHTS: [(plain_name(n), t) for n, t in weights.items() if aliases[n] == n]}
        state["aliases"] = {name: other for name, other in aliases.items() if name != other}
        [optimizer] = state.pop("optimizer_states", None) or [None]
        if optimizer is not None:
            state["optimizer_groups"] = optimizer["param_groups"]
            names = names_by_number(optimizer["param_groups"])
            state["optimizer_numbers"], moments = split_moments(
                (names[number], values) for number, values in optimizer["state"].items()
            )
            tensors |= moments
        write_checkpoint(Path(path), state, tensors)

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        folder = Path(path)
        state = read_state(folder)
        weights = {full_name(n): t for n, t in read_all(folder / WEIGHTS)}
        state["state_dict"] = weights | {n: weights[other] for n, other in state.pop("aliases").items()}
        if "optimizer_groups" in state:
            groups, numbers = state.pop("optimizer_groups"), state.pop("optimizer_numbers")
            names = names_by_number(groups)
            moments: dict[str, dict[str, Any]] = {name: dict(values) for name, values in numbers.items()}
            for moment in moment_folders(folder):
                for name, tensor in read_all(moment):
                    moments[name][moment.name] = tensor
            optimizer = {number: moments[name] for number, name in names.items() if name in moments}
            state["optimizer_states"] = [{"state": optimizer, "param_groups": groups}]
        return state

    @override
    def remove_checkpoint(self, path: Any) -> None:
        discard(Path(path))


def split_moments(
    states: Iterator[tuple[str, dict[str, Any]]],
) -> tuple[dict[str, dict[str, Any]], dict[str, list[NamedTensor]]]:
    """Divide the optimizer's state by parameter into numbers (step) and tensors of the parameter's shape."""
    numbers: dict[str, dict[str, Any]] = {}
    moments: dict[str, list[NamedTensor]] = {}
    for name, values in states:
        numbers[name] = {k: v for k, v in values.items() if not len(getattr(v, "shape", ()))}
        for key in values.keys() - numbers[name].keys():
            moments.setdefault(key, []).append((name, values[key]))
    return numbers, dict(sorted(moments.items()))


def moment_folders(folder: Path) -> list[Path]:
    """The optimizer's moments in a checkpoint."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name != WEIGHTS)


def read_all(folder: Path) -> Iterator[NamedTensor]:
    """All tensors of a folder, one at a time."""
    files = WeightFiles(str(folder))
    return ((name, files(name)) for name in files.file_of)


def names_by_number(groups: list[dict[str, Any]]) -> dict[int, str]:
    """The names of an optimizer's parameters by their numbers in its state."""
    pairs = (zip(group["params"], group["param_names"], strict=True) for group in groups)
    return dict(pair for group in pairs for pair in group)


PREFIX = "entry.model."  # of the policy's weights in a LightningModule's


def plain_name(name: str) -> str:
    """As from_pretrained knows it."""
    return name.removeprefix(PREFIX)


def full_name(name: str) -> str:
    """As the LightningModule knows it."""
    return PREFIX + name
