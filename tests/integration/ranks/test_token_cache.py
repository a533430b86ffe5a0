"""Tokenised rows in a table: equal items, made by one process, mapped by others, remade on a change."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.compute
import pyarrow.parquet
import pytest
import ranks
from commands import ROOT, Running, python, wait_until
from trainers import bare_trainer

from rlt_lightning.datamodules import (
    ScoringData,
    StratosDataModule,
    StudentOPDData,
    StudentRLData,
    StudentSFTData,
    TeacherRLData,
    TeacherSFTData,
)
from rlt_lightning.datamodules.sources import read_rows
from rlt_lightning.datamodules.stages import SFTData
from rlt_lightning.datamodules.token_cache import VERSION, flatten_item, hash_value
from rlt_lightning.modules import SFTModule
from rlt_lightning.types import InputError

MakeData = Callable[..., StratosDataModule]
STAGES = [TeacherRLData, TeacherSFTData, StudentSFTData, ScoringData, StudentRLData]


def row_of(number: int) -> dict[str, Any]:
    trace = f"First we add {number} and 1. " * (1 + number % 5)
    return {"question": f"{number}+1?", "solution": f"\\boxed{{{number + 1}}}", "reasoning_trace": trace}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A file of rows, two of them bad and one too long to be used whole."""
    rows: list[dict[str, Any]] = [row_of(number) for number in range(40)]
    for row in rows:
        row["response"] = f"<think>{row['reasoning_trace']}</think>{row['solution']}"
    rows[3]["solution"] = ""
    rows[7]["question"] = None
    rows[11] |= {"reasoning_trace": "long " * 600, "note": {"tags": ["a", None, 1.5], "é": float("inf")}}
    return write_rows(tmp_path / "rows.jsonl", rows)


@pytest.fixture
def make_data(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeData:
    """Build a datamodule whose cache lies in the test's folder."""
    monkeypatch.setenv("RLT_CACHE_DIR", str(tmp_path))

    def make(*sources: str, **options: Any) -> StratosDataModule:
        settings = {"prompts_per_step": 4, "max_bad_frac": 0.2}
        options = {"tokenizer": tiny_model, "kind": TeacherRLData, **settings, **options}
        data = options.pop("kind")(list(sources), **options)
        data.setup("fit")
        return data

    return make


def entries(folder: Path) -> set[str]:
    """Folders of all entries that are complete."""
    return {str(path.parent) for path in (folder / "tokens").rglob("dataset_info.json")}


def no_items(*_: Any) -> Any:
    raise AssertionError("A row was tokenised again.")


# Equal, and made once


@pytest.mark.parametrize("kind", STAGES)
def test_mapped_items_equal_those_just_made(
    make_data: MakeData,
    source: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[StratosDataModule],
) -> None:
    options: dict[str, Any] = {"kind": kind}
    options |= {"val_rows": 5} if kind is not ScoringData else {}
    options |= {"max_length": 400} if kind is not StudentRLData else {}
    options |= {"long_traces": "truncate"} if issubclass(kind, SFTData) else {}
    first = make_data(source, **options)
    [entry] = entries(tmp_path)
    made = {
        number: first.build_items(number, first.parse(first.complete(columns)), columns)
        for number, columns in read_rows(source)
        if isinstance(columns, dict) and number in set(first.all_items.rows.tolist())
    }
    assert [[item] for item in first.items] == [made[item.row] for item in first.items]
    assert [[item] for item in first.val_items] == [made[item.row] for item in first.val_items]
    monkeypatch.setattr(kind, "build_items", no_items)
    second = make_data(source, **options)
    assert list(second.items) == list(first.items)
    assert list(second.train_dataloader()) == list(first.train_dataloader())
    assert list(second.val_dataloader()) == list(first.val_dataloader())
    assert [report.as_dict() for report in second.reports] == [report.as_dict() for report in first.reports]
    assert (second.system_prompts, second.reports[0].truncated) == (
        first.system_prompts,
        [12] if issubclass(kind, SFTData) else [],
    )
    assert entries(tmp_path) == {entry}


def test_a_class_of_ones_own_gets_no_items_of_before(
    make_data: MakeData, source: str, tmp_path: Path
) -> None:
    class Longer(TeacherRLData):
        def complete(self, columns: dict[str, Any]) -> dict[str, Any]:
            return super().complete({**columns, "question": f"{columns['question']} Explain."})

    before = make_data(source).items
    assert len(entries(tmp_path)) == 1
    changed = make_data(source, kind=Longer).items
    assert len(changed[0].teacher_prompt) > len(before[0].teacher_prompt)
    assert len(entries(tmp_path)) == 1


def test_one_table_holds_items_and_the_reasons_of_rejected_rows(
    make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[Any] = [row_of(number) for number in range(30)]
    rows[3]["solution"] = ""
    source = write_rows(tmp_path / "rows.jsonl", rows)
    Path(source).write_text(Path(source).read_text() + '{"question"\n\n')  # a bad line, and a blank one
    options: dict[str, Any] = {"kind": StudentSFTData, "max_length": 400, "long_traces": "truncate"}
    first = make_data(source, **options)
    assert len(entries(tmp_path)) == 1
    table = first.items.table
    rejected = table.filter(pyarrow.compute.is_valid(table["rejected"]))
    reasons = dict(zip(rejected["row"].to_pylist(), rejected["rejected"].to_pylist(), strict=True))
    assert reasons == {4: "empty_solution", 31: "broken_json"}
    assert table.num_rows - rejected.num_rows == len(first.items) == 29
    monkeypatch.setattr(StudentSFTData, "build_items", no_items)
    [report] = make_data(source, **options).reports
    assert report.as_dict() == first.reports[0].as_dict()
    assert report.num_rows == 31
    assert "Expecting" in dict((row, error.detail) for row, error in report.bad)[31]


def test_items_cost_their_token_ids(make_data: MakeData, source: str) -> None:
    items = make_data(source, kind=StudentSFTData, max_length=10**6).items
    num_bytes = items.table.nbytes
    num_tokens = int(items.sum_columns("token_ids").sum())
    beside = 800 * len(items)  # numbers of each item, and the system prompt
    assert 4 * num_tokens <= num_bytes <= 4 * num_tokens + beside


def test_columns_that_json_does_not_know_come_back(make_data: MakeData, tmp_path: Path) -> None:
    now = datetime.datetime(2025, 1, 2, 3, 4, 5)
    extra = {"when": now, "raw": b"\x00\xff", "day": now.date(), "number": 7, "names": ["a", "b"]}
    dataset = datasets.Dataset.from_list([row_of(number) | extra for number in range(20)])
    dataset.to_parquet(tmp_path / "rows.parquet")
    rows = [columns for _, columns in read_rows(str(tmp_path / "rows.parquet"))]
    for _ in range(2):
        found = [item.columns for item in make_data(str(tmp_path / "rows.parquet")).problems]
        assert found == rows


def test_a_reason_that_quotes_half_a_pair_is_stored(make_data: MakeData, tmp_path: Path) -> None:
    rows: list[Any] = [{"question": f"{n}?", "solution": r"\boxed{1}"} for n in range(9)]
    rows[3]["kind"] = "odd \ud83e"
    source = write_rows(tmp_path / "rows.jsonl", rows)
    [report] = make_data(source, kind=StudentRLData).reports
    assert len(entries(tmp_path)) == 1
    assert report.rows_by_reason() == {"wrong_type": [4]}


# What makes another entry

CHANGES: dict[str, dict[str, Any]] = {
    "stage": {"kind": TeacherSFTData},
    "max_rows": {"max_rows": 30},
    "limit": {"max_prompt_length": 300},
    "tags": {"tags": "r1"},
    "teacher's prompt": {"teacher_system_prompt": "Teach."},
    "student's prompt": {"student_system_prompt": "Learn."},
    "trace": {"kind": TeacherSFTData, "trace_columns": ["solution"]},
    "explanation": {"kind": StudentOPDData},
    "hint": {"kind": StudentOPDData, "view": "hint"},
}


def test_a_changed_setting_makes_another_entry(
    make_data: MakeData, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_data(source)
    for number, (name, change) in enumerate(CHANGES.items(), start=2):
        make_data(source, **change)
        assert len(entries(tmp_path)) == number, name
    monkeypatch.setattr(TeacherRLData, "build_items", no_items)
    make_data(source)
    make_data(source, **CHANGES["tags"])


def test_settings_that_change_no_item_share_an_entry(
    make_data: MakeData, source: str, tmp_path: Path
) -> None:
    make_data(source)
    other = {"seed": 3, "val_rows": 4, "prompts_per_step": 2, "val_batch_size": 1, "max_bad_frac": 0.9}
    data = make_data(source, **other, output_dir=str(tmp_path / "run"))
    assert len(entries(tmp_path)) == 1
    [report] = json.loads((tmp_path / "run/data_report.json").read_text())["sources"]
    assert [bad["row"] for bad in report["bad_rows"]] == [4, 8]
    assert data.reports[0].rows_by_reason() == {"empty_solution": [4], "empty_question": [8]}


def test_a_changed_row_or_tokenizer_is_noticed(
    make_data: MakeData, source: str, tmp_path: Path, tiny_model: str, smollm2: str
) -> None:
    before = os.stat(source)
    assert make_data(source).problems[0].question == "0+1?"
    text = Path(source).read_text()
    Path(source).write_text(text.replace('"0+1?"', '"9+1?"'))
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))  # the same size and time
    assert make_data(source).problems[0].question == "9+1?"
    assert len(entries(tmp_path)) == 2
    whole = [item.teacher_prompt for item in make_data(source, tokenizer=smollm2).problems]
    assert whole != [item.teacher_prompt for item in make_data(source).problems]
    assert len(entries(tmp_path)) == 3


def test_an_edited_template_is_noticed(
    make_data: MakeData, source: str, tmp_path: Path, tiny_model: str
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_start|>", "<|im_start|> ")
    tokenizer.save_pretrained(tmp_path / "edited")
    make_data(source, tokenizer=tiny_model)
    make_data(source, tokenizer=str(tmp_path / "edited"))
    assert len(entries(tmp_path)) == 2


def test_items_are_those_of_their_version(make_data: MakeData, source: str) -> None:
    made = [make_data(source, kind=kind).all_items for kind in STAGES]
    made += [make_data(name, max_rows=40).all_items for name in ("word_sums", "countdown")]
    items = [flatten_item(item) | {"columns": None} for some in made for item in some]
    others = "These items differ from earlier ones. Raise token_cache.VERSION, and write their digest here."
    assert (VERSION, hash_value(items)) == (1, "37abaa199b82b1d661b348828a1cb798"), others


# Processes


def train(rank: int, model: str, source: Any, folder: str) -> None:
    """Fine-tune for two steps as one of two ranks; write the loss and how many rows this rank tokenised."""
    counted: list[int] = []
    build_items = StudentSFTData.build_items
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLT_CACHE_DIR", folder)
        patch.setattr(
            StudentSFTData, "build_items", lambda self, *words: counted.append(1) or build_items(self, *words)
        )
        options = dict(prompts_per_step=4, max_bad_frac=0.2, max_length=400)
        data = StudentSFTData(source, tokenizer=model, **options)
        module = SFTModule(pretrained=model)
        trainer = bare_trainer(Path(folder), steps=2, devices=2, strategy="ddp")
        trainer.fit(module, datamodule=data)
    written = {"loss": trainer.callback_metrics["policy/loss"].item(), "tokenised": len(counted)}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(written))


def test_one_rank_tokenises_and_the_losses_are_the_same(tiny_model: str, source: str, tmp_path: Path) -> None:
    rows = [columns for _, columns in read_rows(source)]

    def run(source: Any) -> list[dict[str, Any]]:
        ranks.call(train, tmp_path, tiny_model, source, str(tmp_path))
        return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]

    uncached, first, second = run(rows), run(source), run(source)
    tokenised = [sorted(rank["tokenised"] for rank in run) for run in (uncached, first, second)]
    assert tokenised == [[38, 38], [0, 38], [0, 0]]
    assert len({rank["loss"] for run in (uncached, first, second) for rank in run}) == 1
    assert len(entries(tmp_path)) == 1


SETUP = """
import os
from rlt_lightning.datamodules import StudentSFTData
os.environ["RLT_CACHE_DIR"] = {cache!r}
data = StudentSFTData({source!r}, tokenizer={model!r})
data.setup("fit")
print(len(data.items), sum(hash(tuple(item.token_ids)) for item in data.items))
"""


@pytest.mark.full
def test_a_kill_while_writing_leaves_nothing_broken(tiny_model: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [row_of(number) for number in range(4000)])
    code = SETUP.format(source=source, model=tiny_model, cache=str(tmp_path / "killed"))
    whole = python(SETUP.format(source=source, model=tiny_model, cache=str(tmp_path / "whole")), ROOT)
    for size in (1, 100_000):
        process = Running((), None, ROOT, "", {}, code)

        def writes(size: int = size, process: Running = process) -> bool:
            assert process.poll() is None, process.stderr
            return any(path.stat().st_size >= size for path in (tmp_path / "killed").rglob("*.arrow"))

        wait_until(writes)
        process.killpg()
        process.wait()
        assert entries(tmp_path / "killed") == set()
    again = python(code, ROOT)
    assert (again.returncode, again.stdout) == (0, whole.stdout), again.stderr
    assert len(entries(tmp_path / "killed")) == 1


# The folder


def test_a_failed_source_leaves_no_entry(make_data: MakeData, tmp_path: Path) -> None:
    source = tmp_path / "rows.csv"
    source.write_text("question,solution\n" + "q,s\n" * 50 + '"q')
    with pytest.raises(InputError, match="rows"):
        make_data(str(source))
    assert entries(tmp_path) == set()
