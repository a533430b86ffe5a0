"""Rows from every kind of source, and from the part of it that a split names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from rows_of import write_rows

from rlt_lightning.checkpoints.card import write_data_card
from rlt_lightning.datamodules import TeacherRLData
from rlt_lightning.datamodules.sources import SourceReader, parse_sources, read_rows
from rlt_lightning.types import BadRowReason, InputError

ROWS: dict[str, list[dict[str, Any]]] = {
    split: [{"question": f"{split} {i}?", "solution": "007"} for i in range(number)]
    for split, number in (("train", 10), ("test", 4))
}


@pytest.fixture(autouse=True)
def library_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def build_splits() -> datasets.DatasetDict:
    return datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in ROWS.items()})


def write_parquet_folder(folder: Path) -> str:
    for name, rows in build_splits().items():
        rows.to_parquet(folder / f"{name}.parquet")
    return str(folder)


def write_arrow_folder(folder: Path) -> str:
    for name, rows in ROWS.items():
        folder.mkdir(exist_ok=True)
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_file(folder / f"{name}.arrow", table.schema) as writer:
            writer.write_table(table)
    return str(folder)


# Sources with splits
KINDS: dict[str, Callable[[Path], Any]] = {"Parquet": write_parquet_folder, "Arrow": write_arrow_folder}


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_has_splits(kind: str, tmp_path: Path) -> None:
    [source] = parse_sources(KINDS[kind](tmp_path / "source"))
    expected = {"train": ROWS["train"], "test": ROWS["test"]}
    for split, rows in expected.items():
        assert read_rows(source, split) == list(enumerate(rows, start=1)), split
    with pytest.raises(InputError, match="split") as raised:
        read_rows(source, "dev")
    assert "\n" not in str(raised.value)
    prints = [json.dumps(SourceReader(split).fingerprint(source)) for split in (*expected, *expected)]
    assert len(set(prints)) == len(expected)


OBJECTS: dict[str, Any] = {
    "Dataset": datasets.Dataset.from_list(ROWS["train"]),
    "IterableDataset": datasets.Dataset.from_list(ROWS["train"]).to_iterable_dataset(),
    "generator": datasets.IterableDataset.from_generator(lambda: iter(ROWS["train"])),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_of_the_library_are_rows(kind: str) -> None:
    rows = OBJECTS[kind]
    [source] = parse_sources(rows)
    assert read_rows(source, max_rows=3) == list(enumerate(ROWS["train"][:3], start=1))
    options: dict[str, Any] = {"tokenizer": "miniature", "prompts_per_step": 1}
    data = TeacherRLData(rows, max_rows=5, **options)
    data.setup("fit")
    assert [problem.question for problem in data.problems] == [row["question"] for row in ROWS["train"][:5]]


def test_an_endless_stream_is_read_as_far_as_max_rows() -> None:
    endless = datasets.IterableDataset.from_generator(lambda: (ROWS["train"][0] for _ in iter(int, 1)))
    [source] = parse_sources(endless)
    assert len(read_rows(source, max_rows=7)) == 7


def test_local_tables_leave_nothing_in_the_librarys_cache(tmp_path: Path, library_cache: Path) -> None:
    for number, kind in enumerate(KINDS):
        [source] = parse_sources(KINDS[kind](tmp_path / str(number)))
        SourceReader().fingerprint(source)
        read_rows(source)
    assert not list(library_cache.rglob("*.arrow"))


def test_a_replaced_table_of_the_same_time_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    prints = []
    for answer in ("7", "8"):
        datasets.Dataset.from_list([{"question": "q", "solution": answer}]).to_parquet(path)
        os.utime(path, (0, 0))
        assert read_rows(str(path)) == [(1, {"question": "q", "solution": answer})]
        prints.append(SourceReader().fingerprint(str(path)))
    assert prints[0] != prints[1]


# Text files, which `datasets` would read, but as other values


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
@pytest.mark.parametrize("text", ["1e400", "-1e999", "1.5e309"])
def test_a_number_that_no_float_holds_stays_text(suffix: str, text: str, tmp_path: Path) -> None:
    row = f'{{"question": "q", "solution": "s", "answer": {text}, "list": [{text}, 1e300]}}'
    path = tmp_path / f"rows.{suffix}"
    for content in (f"[{row}]", f"{row}\n") if suffix == "jsonl" else (f"[{row}]",):
        path.write_text(content)
        [(_, columns)] = read_rows(str(path))
        assert columns == {"question": "q", "solution": "s", "answer": text, "list": [text, 1e300]}


def test_text_is_read_as_the_library_would_not(tmp_path: Path) -> None:
    (tmp_path / "ragged.csv").write_text("question,solution\nq,007\nq\nq,s,t\nq,8\n")
    (tmp_path / "bad.jsonl").write_text('{"question": "q", "solution": "s"}\n{"question"\n')
    rows = [{"answer": answer} for answer in ("2024-01-05", 2**70, 7, 7.5)]
    found = [row for _, row in read_rows(write_rows(tmp_path / "types.jsonl", rows))]
    assert [repr(row["answer"]) for row in found] == [repr(row["answer"]) for row in rows]
    ragged = [row for _, row in read_rows(str(tmp_path / "ragged.csv"))]
    assert [row for row in ragged if isinstance(row, dict)] == [
        {"question": "q", "solution": text} for text in ("007", "8")
    ]
    assert [row.reason for row in ragged if not isinstance(row, dict)] == [BadRowReason.WRONG_TYPE] * 2
    assert [number for number, row in read_rows(str(tmp_path / "bad.jsonl")) if isinstance(row, dict)] == [1]


# Folders as git copies them from the hub


def three_rows(name: str) -> list[dict[str, Any]]:
    return [{"question": f"{name} {i}?", "solution": "s"} for i in range(3)]


def numbered(name: str) -> list[tuple[int, dict[str, Any]]]:
    return list(enumerate(three_rows(name), start=1))


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(path)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A data set with two splits, as git copies it: card, infos, attributes, and a picture."""
    folder = tmp_path / "copied"
    for split in ("train", "test"):
        write_parquet(folder / f"data/{split}-00000-of-00001.parquet", three_rows(split))
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
        write_parquet(folder / name / "train-00000-of-00001.parquet", three_rows(name))
    parts = [f"- {{config_name: {name}, data_files: '{name}/train-*'}}\n" for name in ("main", "socratic")]
    (folder / "README.md").write_text(f"---\nconfigs:\n{''.join(parts)}---\n")
    assert read_rows(f"{folder}:main") == numbered("main")
    assert read_rows(f"{folder}:socratic") == numbered("socratic")
    with pytest.raises(InputError, match=r"could not be loaded \(Config name is missing.*'main', 'socratic'"):
        read_rows(str(folder))


def test_a_folder_that_predict_has_written_loads_by_its_card(tmp_path: Path) -> None:
    folder = tmp_path / "generated"
    write_parquet(folder / "distillation.parquet", three_rows("made"))
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
