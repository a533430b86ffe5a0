"""Rows from every kind of source, and from the part of it that a split names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from rlt_lightning.callbacks.predictions import write_parquet
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


def write_hub_copy(folder: Path) -> str:
    for name, rows in build_splits().items():
        rows.to_parquet(folder / f"data/{name}-00000-of-00001.parquet")
    parts = "".join(f"  - {{split: {name}, path: data/{name}-*}}\n" for name in ROWS)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{parts}---\n")
    return str(folder)


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


def write_saved_sets(folder: Path) -> str:
    build_splits().save_to_disk(folder)
    return str(folder)


# Sources with splits
KINDS: dict[str, Callable[[Path], Any]] = {
    "copy of a hub id": write_hub_copy,
    "folder of Parquet": write_parquet_folder,
    "folder of Arrow": write_arrow_folder,
    "saved sets": write_saved_sets,
    "DatasetDict": lambda _: build_splits(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_has_splits_and_parts_of_them(kind: str, tmp_path: Path) -> None:
    [source] = parse_sources(KINDS[kind](tmp_path / "source"))
    expected = {"train": ROWS["train"], "test": ROWS["test"], "train[:20%]": ROWS["train"][:2]}
    expected |= {"train[2:-1]": ROWS["train"][2:-1], "train[50%:]": ROWS["train"][5:]}
    for split, rows in expected.items():
        assert read_rows(source, split) == list(enumerate(rows, start=1)), split
    with pytest.raises(InputError, match="split") as raised:
        read_rows(source, "dev")
    assert "\n" not in str(raised.value)
    prints = [json.dumps(SourceReader(split).fingerprint(source)) for split in (*expected, *expected)]
    assert len(set(prints)) == len(expected)


@pytest.mark.parametrize("kind", ["copy of a hub id", "saved sets", "DatasetDict"])
def test_splits_may_be_added(kind: str, tmp_path: Path) -> None:
    [source] = parse_sources(KINDS[kind](tmp_path / "source"))
    rows = ROWS["train"][:1] + ROWS["test"]
    assert read_rows(source, "train[:1]+test") == list(enumerate(rows, start=1))


@pytest.mark.parametrize(
    "rows",
    [
        datasets.Dataset.from_list(ROWS["train"]),
        datasets.Dataset.from_list(ROWS["train"]).to_iterable_dataset(),
        datasets.IterableDatasetDict(
            {"train": datasets.Dataset.from_list(ROWS["train"]).to_iterable_dataset()}
        ),
        datasets.IterableDataset.from_generator(lambda: iter(ROWS["train"])),
    ],
    ids=["Dataset", "IterableDataset", "IterableDatasetDict", "generator"],
)
def test_objects_of_the_library_are_rows(rows: Any, tmp_path: Path) -> None:
    [source] = parse_sources(rows)
    assert read_rows(source, max_rows=3) == list(enumerate(ROWS["train"][:3], start=1))
    options: dict[str, Any] = {"tokenizer": "miniature", "prompts_per_step": 1}
    data = TeacherRLData(rows, token_cache=str(tmp_path / "tokens"), max_rows=5, **options)
    data.setup("fit")
    assert [problem.question for problem in data.problems] == [row["question"] for row in ROWS["train"][:5]]


def test_an_endless_stream_is_read_as_far_as_max_rows() -> None:
    endless = datasets.IterableDataset.from_generator(lambda: (ROWS["train"][0] for _ in iter(int, 1)))
    [source] = parse_sources(endless)
    reader = SourceReader(max_rows=7)
    assert len(list(reader.read(source))) == 7
    assert reader.fingerprint(source) == reader.fingerprint(source)


def test_local_tables_leave_nothing_in_the_librarys_cache(tmp_path: Path, library_cache: Path) -> None:
    for number, kind in enumerate(KINDS):
        [source] = parse_sources(KINDS[kind](tmp_path / str(number)))
        SourceReader().fingerprint(source)
        read_rows(source)
    assert not list(library_cache.rglob("*.arrow"))


@pytest.mark.parametrize("split", ["train", "train[:1]"])
def test_a_replaced_table_of_the_same_time_is_noticed(split: str, tmp_path: Path) -> None:
    import os

    path = tmp_path / "rows.parquet"
    prints = []
    for answer in ("7", "8"):
        datasets.Dataset.from_list([{"question": "q", "solution": answer}]).to_parquet(path)
        os.utime(path, (0, 0))
        assert read_rows(str(path), split) == [(1, {"question": "q", "solution": answer})]
        prints.append(SourceReader().fingerprint(str(path)))
    assert prints[0] != prints[1]


def test_what_predict_writes_is_read_as_it_was(tmp_path: Path) -> None:
    rows = [{"question": "q", "solution": "s", "note": note} for note in (1, "x", {"b": [1, None]}, None)]
    write_parquet(rows, tmp_path / "rows.parquet")
    assert read_rows(str(tmp_path / "rows.parquet")) == list(enumerate(rows, start=1))


# Text files


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
    ragged = read_rows(str(tmp_path / "ragged.csv"))
    assert [row for _, row in ragged if isinstance(row, dict)] == [
        {"question": "q", "solution": "007"},
        {"question": "q", "solution": "8"},
    ]
    assert [row.reason for _, row in ragged if not isinstance(row, dict)] == [BadRowReason.WRONG_TYPE] * 2
    assert [number for number, row in read_rows(str(tmp_path / "bad.jsonl")) if isinstance(row, dict)] == [1]
