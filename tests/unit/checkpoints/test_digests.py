"""Digests of checkpoints and exported models: a changed bit, or another run's file, is always noticed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from damage import build_checkpoint, build_model, count_unnoticed

from rlt_lightning.checkpoints.folder import read_state, read_whole_state, write_checkpoint
from rlt_lightning.checkpoints.io import FolderCheckpointIO
from rlt_lightning.models.load import empty_model, load_model, load_tokenizer
from rlt_lightning.run.digests import SUFFIX
from rlt_lightning.types import InputError


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_flipped_bit_of_a_checkpoint_is_noticed(
    num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_checkpoint(tmp_path / "step=000006.ckpt", 1.0, monkeypatch if num_ranks == 2 else None)
    assert len(list(folder.glob(f"*{SUFFIX}"))) == num_ranks
    assert len(list(folder.rglob("*.safetensors"))) == (9 if num_ranks == 2 else 3)
    assert count_unnoticed(folder, lambda: FolderCheckpointIO().load_checkpoint(folder)) == []


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


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_flipped_bit_of_a_model_is_noticed(
    num_ranks: int, miniature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_model(miniature, tmp_path / "model", monkeypatch if num_ranks == 2 else None)
    assert len(list(folder.glob(f"*{SUFFIX}"))) == num_ranks
    (folder / "README.md").unlink()  # there to be edited
    assert count_unnoticed(folder, lambda: load_model(str(folder))) == []
    assert count_unnoticed(folder, lambda: empty_model(str(folder))) == []


def test_own_changes_of_a_model_can_be_accepted(miniature: str, tmp_path: Path) -> None:
    folder = build_model(miniature, tmp_path / "model")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{# mine #}")
    digests = folder / f"rank0{SUFFIX}"
    lines = ["\n" if template.name in line else line for line in digests.open()]  # an editor leaves it empty
    digests.write_text("".join(lines))
    (folder / "notes.txt").touch()
    assert "mine" in load_tokenizer(str(folder)).chat_template
    load_model(str(folder))
    digests.unlink()  # as anybody else's model
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    load_model(str(folder))
