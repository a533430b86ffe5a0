"""Files of checkpoints and of the token cache: a changed bit, or a file of another run, is never believed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import Barrier, Thread
from typing import Any

import pytest
import torch

from rlt_lightning.checkpoints.folder import read_state, read_whole_state, write_checkpoint
from rlt_lightning.checkpoints.io import FolderCheckpointIO
from rlt_lightning.digests import SUFFIX
from rlt_lightning.models import weights
from rlt_lightning.types import InputError

NUM_FLIPS = 64


class Rank:
    """The part of a strategy that writing needs."""

    world_size = 2

    def __init__(self, global_rank: int, barrier: Barrier) -> None:
        self.global_rank = global_rank
        self.barrier = barrier.wait


def build_checkpoint(folder: Path, scale: float = 1.0, monkeypatch: Any = None) -> Path:
    """A checkpoint with moments; by two ranks and in several files each if there is a monkeypatch."""
    names = [f"entry.model.{name}" for name in "abc"]
    tensors = {name: scale * torch.arange(40.0).reshape(8, 5) for name in names}
    pairs = [(name.removeprefix("entry.model."), tensor) for name, tensor in tensors.items()]
    groups = [{"params": [0, 1, 2], "param_names": ["a", "b", "c"], "lr": 0.1}]
    state = {"model": {"pretrained": "m"}, "aliases": {}, "optimizer_groups": groups, "global_step": 6}
    state["optimizer_numbers"] = {name: {"step": torch.tensor(6.0)} for name, _ in pairs}
    files = {"weights": pairs, "exp_avg": pairs, "exp_avg_sq": pairs}
    if monkeypatch is None:
        write_checkpoint(folder, state, files)
        return folder
    monkeypatch.setattr(weights, "FILE_BYTES", 200)
    barrier = Barrier(2)
    ranks = [Thread(target=write_checkpoint, args=(folder, state, files, Rank(i, barrier))) for i in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return folder


def count_unnoticed(folder: Path, load: Callable[[], Any]) -> list[str]:
    """Flip bits all over the files of a folder, one at a time; returns the flips that nothing noticed."""
    random, unnoticed = Random(0), []
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for number in range(NUM_FLIPS):
        path = files[number % len(files)]
        content = path.read_bytes()
        place, bit = random.randrange(len(content)), random.randrange(8)
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        with suppress(InputError):
            load()
            unnoticed.append(f"{path.name}: bit {bit} of byte {place}")
        path.write_bytes(content)
    load()
    return unnoticed


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_flipped_bit_of_a_checkpoint_is_noticed(
    num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_checkpoint(tmp_path / "step=000006.ckpt", 1.0, monkeypatch if num_ranks == 2 else None)
    assert len(list(folder.glob(f"*{SUFFIX}"))) == num_ranks
    assert len(list(folder.rglob("*.safetensors"))) == (9 if num_ranks == 2 else 3)
    assert count_unnoticed(folder, lambda: FolderCheckpointIO().load_checkpoint(folder)) == []


def test_a_flipped_bit_names_file_and_remedy(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "step=000006.ckpt")
    file = folder / "weights" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 0x40
    file.write_bytes(content)
    assert read_state(folder)["global_step"] == 6  # who needs only these values does not read the weights
    with pytest.raises(InputError, match=f"{file} has another digest. Resume from another checkpoint"):
        read_whole_state(folder)


@pytest.mark.parametrize("part", ["weights", "exp_avg", "state.pt"])
def test_files_of_another_run_are_noticed(part: str, tmp_path: Path) -> None:
    folder, other = build_checkpoint(tmp_path / "a"), build_checkpoint(tmp_path / "b", scale=2.0)
    if part == "state.pt":
        write_checkpoint(tmp_path / "c", {"model": {}, "aliases": {}}, {})
        shutil.copy(tmp_path / "c" / part, folder / part)
    else:
        shutil.rmtree(folder / part)
        shutil.copytree(other / part, folder / part)
    with pytest.raises(InputError, match="has another digest"):
        FolderCheckpointIO().load_checkpoint(folder)


def test_added_and_missing_files_are_noticed(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "a")
    index = folder / "weights" / "model.safetensors.index.json"  # would hide the weights
    index.write_text("{}")
    with pytest.raises(InputError, match=f"{index} has no digest"):
        read_whole_state(folder)
    index.unlink()
    (folder / "exp_avg" / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"model\.safetensors is missing"):
        read_whole_state(folder)
    for path in folder.glob(f"*{SUFFIX}"):
        path.unlink()
    with pytest.raises(InputError, match="has no digest"):
        read_state(folder)
