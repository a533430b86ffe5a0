"""Digests of checkpoints and of the token cache: a changed bit, or another run's file, is always noticed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from damage import build_checkpoint, count_unnoticed

from rlt_lightning.checkpoints.folder import read_state, read_whole_state, write_checkpoint
from rlt_lightning.checkpoints.io import FolderCheckpointIO
from rlt_lightning.digests import SUFFIX
from rlt_lightning.types import InputError


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
