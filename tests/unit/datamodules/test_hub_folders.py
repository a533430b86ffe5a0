"""Data sets copied from the hub into folders: the card and the infos say which files are which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from rlt_lightning.checkpoints.card import write_data_card
from rlt_lightning.datamodules.sources import read_rows
from rlt_lightning.types import InputError


@pytest.fixture(autouse=True)
def needs_transformers_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def rows_of(name: str, number: int = 3) -> list[dict[str, Any]]:
    return [{"question": f"{name} {i}?", "solution": "s"} for i in range(number)]


def numbered(name: str, number: int = 3) -> list[tuple[int, dict[str, Any]]]:
    return list(enumerate(rows_of(name, number), start=1))


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(path)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A data set with two splits, as git copies it: card, infos, attributes, and a picture."""
    folder = tmp_path / "copied"
    for split in ("train", "test"):
        write_parquet(folder / f"data/{split}-00000-of-00001.parquet", rows_of(split))
    (folder / ".git").mkdir()
    (folder / ".git/config.json").write_text("{}")
    (folder / ".gitattributes").write_text("*.parquet filter=lfs\n")
    (folder / "figure.png").write_bytes(b"\x89PNG")
    features = {name: {"dtype": "string", "_type": "Value"} for name in ("question", "solution")}
    (folder / "dataset_infos.json").write_text(json.dumps({"default": {"features": features}}))
    return folder


CARD = """---
license: apache-2.0
configs:
- config_name: default
  data_files:
  - {split: train, path: data/train-*}
  - {split: test, path: data/test-*}
---
# A set
"""


@pytest.mark.parametrize("files", ["infos", "card", "both"])
def test_a_copied_folder_loads(copied: Path, files: str) -> None:
    if files != "infos":
        (copied / "README.md").write_text(CARD)
    if files == "card":
        (copied / "dataset_infos.json").unlink()
    assert read_rows(str(copied)) == numbered("train")
    assert read_rows(str(copied), "test") == numbered("test")
    with pytest.raises(InputError, match=r"copied' could not be loaded") as error:
        read_rows(str(copied), "dev")
    assert "\n" not in str(error.value)


def test_a_copied_folder_may_have_several_configurations(tmp_path: Path) -> None:
    folder = tmp_path / "gsm"
    for name in ("main", "socratic"):
        write_parquet(folder / name / "train-00000-of-00001.parquet", rows_of(name))
    parts = [f"- {{config_name: {name}, data_files: '{name}/train-*'}}\n" for name in ("main", "socratic")]
    (folder / "README.md").write_text(f"---\nconfigs:\n{''.join(parts)}---\n")
    assert read_rows(f"{folder}:main") == numbered("main")
    assert read_rows(f"{folder}:socratic") == numbered("socratic")
    with pytest.raises(InputError, match=r"could not be loaded \(Config name is missing.*'main', 'socratic'"):
        read_rows(str(folder))


def test_a_folder_that_predict_has_written_loads_by_its_card(tmp_path: Path) -> None:
    folder = tmp_path / "generated"
    write_parquet(folder / "distillation.parquet", rows_of("made"))
    for name in ("traces.jsonl", "distillation.jsonl"):
        (folder / name).write_text("{}\n")
    (folder / "README.md").write_text(write_data_card("Rows", {}, "distillation.parquet"))
    assert read_rows(str(folder)) == numbered("made")


def test_a_readme_without_configurations_changes_nothing(tmp_path: Path) -> None:
    for text in ("# Rows\n\n---\nconfigs: none\n---\n", "---\nlicense: mit\n---\n# Rows\n", ""):
        (tmp_path / "README.md").write_text(text)
        (tmp_path / "rows.jsonl").write_text('{"question": "7", "solution": "s"}\n\n{"question"\n')
        rows = read_rows(str(tmp_path))
        assert [number for number, _ in rows] == [1, 3]  # our reader: numbers of lines, a broken one kept
