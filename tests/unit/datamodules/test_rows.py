"""Rows as users have them: columns of several shapes, tags in texts, files that are not what they seem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from rows_of import write_rows

from rlt_lightning.datamodules import (
    ScoringData,
    StratosDataModule,
    StudentLikelihoodData,
    StudentOPDData,
    StudentRLData,
    StudentSFTData,
    TeacherRLData,
    TeacherSFTData,
)
from rlt_lightning.datamodules.evaluation_sets import read_question
from rlt_lightning.datamodules.rows import parse_row
from rlt_lightning.datamodules.sources import read_rows
from rlt_lightning.tags import R1, STRATOS
from rlt_lightning.types import BadRowReason, InputError

ROW = {"question": "1+6?", "solution": "7", "reasoning_trace": "Count."}


def load(source: str, **options: Any) -> StratosDataModule:
    options = {"tokenizer": "miniature", "prompts_per_step": 1} | options
    data = options.pop("kind", TeacherRLData)(source, **options)
    data.setup("fit")
    return data


# Tags in texts


@pytest.mark.parametrize("tags", ["stratos", "r1"])
@pytest.mark.parametrize("tag", ["<think>", "</think>", *list(STRATOS.tags().values()), "of the style"])
@pytest.mark.parametrize("column", ["reasoning_trace", "other_trace", "solution", "conversations"])
def test_a_tag_in_a_text_makes_a_bad_row(tmp_path: Path, tags: str, tag: str, column: str) -> None:
    if column == "conversations" and tags == "stratos" and tag in R1.tags().values():
        pytest.skip("the outer tags of a turn count: others in it are text")
    style = {"stratos": STRATOS, "r1": R1}[tags]
    text = f"first {tag if tag != 'of the style' else style.solution_open} then more"
    row: dict[str, Any] = ROW | {"other_trace": "Add.", column: text}
    if column == "conversations":
        answer = style.thought_open + text + style.thought_close + style.solution_open
        answer += "7" + style.solution_close
        turns = [{"from": "user", "value": "1+6?"}, {"from": "assistant", "value": answer}]
        row = {"conversations": turns, "other_trace": "Add."}
    source = write_rows(tmp_path / "rows.jsonl", [ROW | {"other_trace": "Add."}, row])
    options = {"trace_columns": ["reasoning_trace", "other_trace"], "max_bad_frac": 0.5, "tags": tags}
    data = load(source, kind=StudentSFTData, **options)
    assert data.reports[0].rows_by_reason() == {BadRowReason.EXTRA_TAG: [2]}
    assert {example.row for example in data.items} == {1}


STAGES = (TeacherRLData, StudentLikelihoodData, TeacherSFTData, ScoringData, StudentOPDData)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        *((stage, {BadRowReason.EXTRA_TAG: [2]}) for stage in STAGES),
        (StudentRLData, {}),  # which only judges it
    ],
)
def test_every_stage_with_solution_tags_refuses_a_tag(kind: Any, reason: Any, tmp_path: Path) -> None:
    row = ROW | {"answer": "7"}
    whole = row | {"solution": "<think>\n1 + 6 is 7.\n</think>\n\n\\boxed{7}"}
    data = load(write_rows(tmp_path / "rows.jsonl", [row, whole]), kind=kind, max_bad_frac=0.5)
    assert data.reports[0].rows_by_reason() == reason


def test_a_trace_may_hold_other_markup() -> None:
    trace = "If 1 < x and <b>x</b> is in <table>, then <|x|> is |x|. <solution> I think </thinking>"
    assert parse_row(ROW | {"reasoning_trace": trace}, STRATOS, ["reasoning_trace"]).traces


# Columns

TURN = [{"role": "user", "content": "1+6?"}]


@pytest.mark.parametrize(
    "columns",
    [
        {"question": None, "problem": "1+6?"},
        {"question": "", "prompt": "1+6?"},
        {"question": " \n", "prompt": None, "problem": "1+6?"},
        {"question": float("nan"), "problem": "1+6?"},
        {"question": 17, "problem": "1+6?"},
        {"question": "17", "problem": "1+6?"},
        {"prompt": TURN, "problem": "1+6?"},
        {"prompt": [*TURN, *TURN], "problem": "1+6?"},
        {"prompt": {"text": "other"}, "problem": "1+6?"},
        {"prompt": TURN},
        {"question": "", "prompt": TURN},
        {"question": "1+6?", "conversations": []},
        {"question": "1+6?", "conversations": None},
    ],
)
def test_a_question_is_the_column_that_holds_one(columns: dict[str, Any]) -> None:
    assert parse_row(columns | {"solution": "7"}, STRATOS).question == "1+6?"


@pytest.mark.parametrize(
    "columns", [{"question": None, "problem": "1+6?"}, {"prompt": TURN, "Question": "1+6?"}]
)
def test_evaluation_questions_are_chosen_alike(columns: dict[str, Any]) -> None:
    assert read_question(columns) == "1+6?"


# Files


ARRAY, LINE, PRETTY = [ROW] * 3, json.dumps(ROW), json.dumps(ROW, indent=2)
TEXTS = {
    "array": (json.dumps(ARRAY), [1, 2, 3]),
    "pretty array": (json.dumps(ARRAY, indent=2), [1, 2, 3]),
    "array by lines": (f"[\n{LINE},\n{LINE},\n{LINE}\n]\n", [1, 2, 3]),
    "pretty": ("\n".join([PRETTY] * 3), [1, 6, 11]),
    "gaps": ("\n\n".join([PRETTY] * 3), [1, 7, 13]),
    "no gaps": (PRETTY * 3, [1, 5, 9]),
    "pretty BOM": ("\ufeff\n" + json.dumps(ARRAY, indent=1), [1, 2, 3]),
    "lines BOM": ("\ufeff" + f"{LINE}\n" * 3, [1, 2, 3]),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_json_that_is_called_jsonl_is_read(kind: str, tmp_path: Path) -> None:
    text, numbers = TEXTS[kind]
    (tmp_path / "rows.jsonl").write_text(text)
    assert read_rows(str(tmp_path / "rows.jsonl")) == [(number, ROW) for number in numbers]


@pytest.mark.parametrize("first", ["{", "[", "[1, 2]", "7", '"text"', '{"question": '])
def test_a_broken_first_line_costs_only_itself(tmp_path: Path, first: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{first}\n" + f"{json.dumps(ROW)}\n" * 2)
    numbers = [number for number, row in read_rows(str(tmp_path / "rows.jsonl")) if row == ROW]
    assert numbers == [2, 3]


@pytest.mark.parametrize("header", ["question,solution,solution", "question,question,solution,solution"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, header: str) -> None:
    names = header.split(",")
    (tmp_path / "rows.csv").write_text(f"{header}\n{','.join('a' * len(names))}\n")
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * len(names), names=names)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    for suffix in ("csv", "parquet"):
        with pytest.raises(InputError, match="solution") as raised:
            read_rows(str(tmp_path / f"rows.{suffix}"))
        assert "\n" not in str(raised.value)


def test_empty_columns_at_the_end_of_a_table_are_none(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("question,solution,,\n1+6?,7,,\n")
    assert load(str(tmp_path / "rows.csv")).items[0].row == 1
