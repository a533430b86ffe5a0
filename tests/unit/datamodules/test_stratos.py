"""Rows from every kind of source, every reason to refuse one, and the batches that come out."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import rows_of
from jsonargparse import ArgumentParser
from trainers import bare_trainer

from rlt_lightning.datamodules import (
    ScoringData,
    StratosDataModule,
    StudentSFTData,
    TeacherRLData,
    TeacherSFTData,
)
from rlt_lightning.datamodules.rows import parse_row
from rlt_lightning.datamodules.sources import read_rows
from rlt_lightning.modules import SFTModule
from rlt_lightning.tags import R1, STRATOS
from rlt_lightning.tasks.stepwise import chain_rows
from rlt_lightning.types import BadRowError, BadRowReason, InputError, Problem, SFTExample

MakeData = Callable[..., StratosDataModule]


def stratos_row(question: str = "1+6?", thought: str = "Count.", solution: str = "It is 7.") -> Any:
    system = "Think between <|begin_of_thought|> and <|end_of_thought|>."
    return rows_of.stratos_row(question, thought, solution, system)


def custom_row(question: str = "1+6?", solution: str = "7", trace: str = "Count.") -> dict[str, Any]:
    return {"question": question, "solution": solution, "reasoning_trace": trace}


def write_jsonl(path: Path, rows: list[Any]) -> str:
    lines = (row if isinstance(row, (str, bytes)) else json.dumps(row) for row in rows)
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return str(path)


@pytest.fixture
def make_data(tiny_model: str, tmp_path: Path) -> MakeData:
    """Build a datamodule with the tiny model's tokenizer and set it up for fit."""

    def make(
        rows: list[Any] | str = "chains",
        stage: str = "fit",
        sources: list[str] | None = None,
        kind: type[StratosDataModule] = TeacherRLData,
        **options: Any,
    ) -> StratosDataModule:
        source = rows if isinstance(rows, str) else write_jsonl(tmp_path / "rows.jsonl", rows)
        options = {"tokenizer": tiny_model, "prompts_per_step": 1, "num_embedded_rows": 20, **options}
        data = kind(sources or source, **options)
        data.setup(stage)
        return data

    return make


def decode(data: StratosDataModule, token_ids: list[int]) -> str:
    return data.format.tokenizer.decode(token_ids, skip_special_tokens=False)


# Real rows


def test_true_rows_of_bespoke_stratos_are_read_as_they_are(make_data: MakeData, shared: Path):
    path = shared / "data/stratos_format/bespoke_true_2.jsonl"
    data = make_data(str(path))
    assert data.reports[0].bad == []
    for problem, line in zip(data.items, path.read_text().splitlines(), strict=True):
        row = json.loads(line)
        answer = row["conversations"][1]["value"]
        assert isinstance(problem, Problem)
        assert problem.question == row["conversations"][0]["value"]
        assert f"<|begin_of_solution|>{problem.solution}<|end_of_solution|>" in answer
        assert problem.solution.startswith("\n\nTo ")
        head = f"<|im_start|>system\n{row['system']}<|im_end|>"
        assert decode(data, problem.student_prefix).startswith(head)
        assert "step by step how to get" in decode(data, problem.teacher_prefix)
        assert problem.columns == row


@pytest.mark.parametrize("name", ["s1k_5", "gsm8k_train", "math100_qwen_cot"])
@pytest.mark.parametrize("tokenizer", ["smollm2", "qwen"])
def test_student_examples_are_the_rows_own_conversation(
    make_data: MakeData, shared: Path, smollm2: str, name: str, tokenizer: str
):
    path = shared / f"data/stratos_format/{name}.jsonl"
    folder = {"smollm2": smollm2, "qwen": str(shared / "data/tokenizers/Qwen2.5-Instruct")}[tokenizer]
    data = make_data(str(path), kind=StudentSFTData, max_rows=5, tokenizer=folder, prompts_per_step=5)
    assert data.reports[0].summary().startswith("0 of 5 rows")
    for example, line in zip(data.items, path.read_text().splitlines(), strict=False):
        row = json.loads(line)
        assert isinstance(example, SFTExample)
        counted = [t for t, count in zip(example.token_ids, example.loss_mask, strict=True) if count]
        assert decode(data, counted) == row["conversations"][1]["value"] + "<|im_end|>"
        head = f"<|im_start|>system\n{row['system']}<|im_end|>\n<|im_start|>user\n"
        assert decode(data, example.token_ids).startswith(head + row["conversations"][0]["value"])


def test_custom_rows_with_prompt_and_question(make_data: MakeData, shared: Path):
    path = shared / "data/rlt_custom_format/aime_1983_2023.jsonl"
    data = make_data(str(path), max_rows=10)
    row = json.loads(path.read_text().splitlines()[3])
    problem = data.problems[3]
    assert (problem.row, problem.question) == (4, row["question"])
    assert problem.solution == f"\n\n{row['solution'].strip()}\n\n"


# Sources


def test_every_kind_of_source_gives_the_same_rows(tmp_path: Path):
    rows = [custom_row('a, "b"\nc'), custom_row("12", "7"), custom_row("é", "", "")]
    dataset = datasets.Dataset.from_list(rows)
    write_jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows))
    dataset.to_parquet(tmp_path / "d.parquet")
    with (tmp_path / "e.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    (tmp_path / "folder/data").mkdir(parents=True)
    write_jsonl(tmp_path / "folder/data/1.jsonl", rows[:2])
    write_jsonl(tmp_path / "folder/data/2.jsonl", rows[2:])
    for name in ("a.jsonl", "b.json", "d.parquet", "e.csv", "folder"):
        assert read_rows(str(tmp_path / name)) == list(enumerate(rows, start=1)), name


def test_a_fingerprint_is_of_the_rows_not_of_their_file(make_data: MakeData, tmp_path: Path):
    rows = [custom_row(f"q{i}", f"s{i}") | {"answer": str(i), "note": None} for i in range(4)]

    def fingerprint(source: Any, **options: Any) -> Any:
        return make_data(sources=source, kind=StudentSFTData, **options).fingerprint_rows()

    files = [write_jsonl(tmp_path / "a.jsonl", [{n: v for n, v in row.items() if v} for row in rows])]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "b.parquet")
    (tmp_path / "folder").mkdir()
    for number in (0, 1):
        write_jsonl(tmp_path / "folder" / f"{number}.jsonl", rows[2 * number : 2 * number + 2])
    files += [str(tmp_path / name) for name in ("b.parquet", "folder")]
    expected = fingerprint(files[0])
    for source in (*files, rows, datasets.Dataset.from_list(rows)):
        assert fingerprint(source) == expected
    assert fingerprint(rows, tags="r1") == expected
    names = ("question", "solution", "reasoning_trace", "answer")
    changed = [[rows[0], rows[1] | {name: "other"}, *rows[2:]] for name in names]
    others = [rows[::-1], rows[:3], [*rows, rows[0]], *changed]
    assert len({json.dumps(fingerprint(other)) for other in (rows, *others)}) == 1 + len(others)


def test_a_fingerprint_names_the_source_that_changed(make_data: MakeData):
    rows = [custom_row(f"q{i}", f"s{i}") for i in range(4)]

    def fingerprint(*sources: Any, **options: Any) -> Any:
        return make_data(sources=list(sources), **options).fingerprint_rows()

    before, now = fingerprint(rows, rows), fingerprint(rows, rows[::-1])
    assert [a == b for a, b in zip(before, now, strict=True)] == [True, False]


def test_a_hub_id_may_name_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # The library takes a folder in the working directory for the data set of that name.
    folder = tmp_path / "lab/sums"
    folder.mkdir(parents=True)
    for name in ("main", "socratic"):
        write_jsonl(folder / f"{name}.jsonl", [custom_row(name)])
    part = "- {{config_name: {0}, data_files: [{{split: test, path: {0}.jsonl}}]}}\n"
    parts = part.format("main") + part.format("socratic")
    (folder / "README.md").write_text(f"---\nconfigs:\n{parts}---\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert read_rows("lab/sums:main", "test") == [(1, custom_row("main"))]
    assert read_rows("lab/sums:socratic", "test") == [(1, custom_row("socratic"))]
    with pytest.raises(InputError, match=r"'lab/sums:none'.*'none' not found.*'main'"):
        read_rows("lab/sums:none", "test")


def test_sources_are_mixed_with_rows_numbered_through_and_a_report_each(make_data: MakeData, tmp_path: Path):
    stratos = write_jsonl(tmp_path / "stratos.jsonl", ["", stratos_row("a?"), "{", stratos_row("b?")])
    own = write_jsonl(tmp_path / "own.jsonl", [custom_row("c?"), custom_row("", "7"), custom_row("d?")])
    sources = [stratos, "chains", own]
    options = {"max_rows": 3, "max_bad_frac": 0.4, "output_dir": str(tmp_path / "run")}
    data = make_data(sources=sources, kind=StudentSFTData, **options)
    assert [item.row for item in data.items] == [2, 4, 5, 6, 7, 8, 10]
    [reports] = json.loads((tmp_path / "run/data_report.json").read_text()).values()
    counts = [tuple(r[name] for name in ("source", "first_row", "num_rows", "num_used")) for r in reports]
    assert counts == [(stratos, 1, 3, 2), ("chains", 5, 3, 3), (own, 8, 3, 2)]
    assert [[bad["row"] for bad in report["bad_rows"]] for report in reports] == [[3], [], [2]]
    with pytest.raises(InputError, match=rf"max_bad_frac=0\.3.*1 of 3 rows of '{stratos}'"):
        make_data(sources=sources, kind=StudentSFTData, **options | {"max_bad_frac": 0.3})


def test_held_out_rows_of_several_sources(make_data: MakeData, tmp_path: Path):
    own = write_jsonl(tmp_path / "own.jsonl", [custom_row("c?"), custom_row("d?")])
    data = make_data(val_source=[own, "chains"], val_rows=3)
    assert [problem.question for problem in data.problems[20:22]] == ["c?", "d?"]
    assert [problem.row for problem in data.problems[20:]] == [1, 2, 3]
    # Held out of all that are mixed, by seed.
    mixed = make_data(sources=[own, "chains"], val_rows=4)
    assert {item.row for item in [*mixed.items, *mixed.val_items]} == set(range(1, 23))
    assert len(mixed.val_items) == 4


def test_a_list_of_sources_on_the_command_line():
    parser = ArgumentParser()
    parser.add_class_arguments(TeacherRLData, "data")
    cases = {"[a.jsonl, lab/set:main]": ["a.jsonl", "lab/set:main"], "lab/set:main": ["lab/set:main"]}
    for text, sources in (cases | {"2024": ["2024"]}).items():
        assert parser.instantiate(parser.parse_args([f"--data.source={text}"])).data.sources == sources


# Understanding rows


def test_turns_may_be_named_in_either_way():
    row = stratos_row()
    question, answer = (turn["value"] for turn in row["conversations"])
    expected = parse_row(row, STRATOS)
    assert (expected.question, expected.solution) == ("1+6?", "\n\nIt is 7.\n\n")
    assert expected.traces == {"reasoning_trace": "\n\nCount.\n\n"}
    renamed = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    assert parse_row({**row, "conversations": renamed}, STRATOS) == expected
    # A table fills the columns that a row does not use with None.
    both = [{"from": None, "value": None, **turn} for turn in renamed]
    assert parse_row({**row, "conversations": both, "question": None}, STRATOS) == expected
    inside = [{"from": "system", "value": row["system"]}, *row["conversations"]]
    assert parse_row({"conversations": inside}, STRATOS) == expected


def test_rows_with_other_tags_than_the_chosen_ones_are_translated():
    parsed = parse_row(stratos_row(), R1)
    assert (parsed.solution, parsed.traces) == ("\nIt is 7.\n", {"reasoning_trace": "\nCount.\n"})
    assert parsed.system == "Think between <think> and </think>."
    r1 = stratos_row()
    r1["conversations"][1]["value"] = "<think>\n\nCount.</think><solution> 7 </solution>"
    parsed = parse_row(r1, R1)
    assert (parsed.solution, parsed.traces) == (" 7 ", {"reasoning_trace": "\n\nCount."})  # as it stands


def without_tag(tag: str) -> dict[str, Any]:
    row = stratos_row()
    turn = row["conversations"][1]
    turn["value"] = turn["value"].replace(tag, "")
    return row


BAD_ROWS = [
    ('{"question": "q", ', BadRowReason.BROKEN_JSON),
    (b'{"question": "\xa3\xbf", "solution": "s", "reasoning_trace": "t"}', BadRowReason.WRONG_ENCODING),
    ("[1, 2]", BadRowReason.WRONG_TYPE),
    ({"question": 7, "solution": "s", "reasoning_trace": "t"}, BadRowReason.WRONG_TYPE),
    ({"conversations": "hello"}, BadRowReason.WRONG_TYPE),
    ({"conversations": [{"from": "user", "value": "q"}]}, BadRowReason.WRONG_TYPE),
    ({"conversations": stratos_row()["conversations"] * 2}, BadRowReason.WRONG_TYPE),
    ({"conversations": ["q", "a"]}, BadRowReason.WRONG_TYPE),
    ({"question": "q", "reasoning_trace": "t"}, BadRowReason.MISSING_COLUMN),
    *[(without_tag(tag), BadRowReason.MISSING_TAGS) for tag in list(STRATOS.tags().values())[:4]],
    (stratos_row(question=" "), BadRowReason.EMPTY_QUESTION),
    (custom_row(question="\n"), BadRowReason.EMPTY_QUESTION),
    (custom_row(question=None), BadRowReason.EMPTY_QUESTION),  # type: ignore[arg-type]
    (stratos_row(solution=""), BadRowReason.EMPTY_SOLUTION),
    (custom_row(solution=" "), BadRowReason.EMPTY_SOLUTION),
    (stratos_row(thought=""), BadRowReason.EMPTY_TRACE),
    (custom_row(trace=""), BadRowReason.EMPTY_TRACE),
    (custom_row(trace="a <|end_of_thought|> b"), BadRowReason.EXTRA_TAG),
    (custom_row(question="long " * 400), BadRowReason.PROMPT_TOO_LONG),
    (custom_row(trace="long " * 600), BadRowReason.TOO_LONG),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS, ids=[f"{i}-{r}" for i, (_, r) in enumerate(BAD_ROWS)])
def test_bad_rows_are_counted_by_reason(make_data: MakeData, tmp_path: Path, row: Any, reason: BadRowReason):
    limits = {"max_prompt_length": 400, "max_length": 600}
    rows = [custom_row(), row, stratos_row()]
    data = make_data(rows, kind=TeacherSFTData, max_bad_frac=0.5, output_dir=str(tmp_path / "run"), **limits)
    assert data.reports[0].rows_by_reason() == {reason: [2]}
    assert [item.row for item in data.items] == [1, 3]
    (report,) = json.loads((tmp_path / "run/data_report.json").read_text())["sources"]
    assert (report["num_rows"], report["num_used"], report["reasons"]) == (3, 2, {str(reason): 1})
    assert report["bad_rows"][0]["row"] == 2
    assert report["bad_rows"][0]["detail"]


def test_traces_are_needed_only_by_tasks_that_use_them(make_data: MakeData):
    rows = [custom_row(trace=""), stratos_row(thought=""), {"question": "q", "solution": "s"}]
    assert len(make_data(rows).items) == 3
    with pytest.raises(BadRowError, match="empty_trace"):
        parse_row(rows[0], STRATOS, ["reasoning_trace"])


def test_too_many_bad_rows_stop_the_run(make_data: MakeData, tmp_path: Path):
    rows = ["{", *[custom_row()] * 8, custom_row(question=" ")]
    with pytest.raises(InputError) as error:
        make_data(rows, max_bad_frac=0.19, output_dir=str(tmp_path / "run"))
    message = str(error.value)
    for part in ("data.max_bad_frac=0.19", "2 of 10 rows", "broken_json 1 (row 1)"):
        assert part in message
    assert "empty_question 1 (row 10)" in message
    assert str(tmp_path / "run/data_report.json") in message
    assert (tmp_path / "run/data_report.json").is_file()
    assert len(make_data(rows, max_bad_frac=0.2).items) == 8
    with pytest.raises(InputError, match="1 of 1 rows"):
        make_data([custom_row(question="")], max_bad_frac=1.0)


# Several traces of a row


def test_each_trace_of_a_row_is_an_item_of_that_row(make_data: MakeData):
    rows = [
        {**custom_row(trace="Count."), "other_trace": " Guess.\n"},
        {**stratos_row(thought="Add."), "other_trace": "Look up.", "completion": "So seven"},
    ]
    both = ["reasoning_trace", "other_trace"]
    data = make_data(rows, kind=ScoringData, stage="predict", prompts_per_step=3, trace_columns=both)
    batches = list(data.predict_dataloader())
    rollouts = [rollout for batch in batches for rollout in batch.rollouts.rollouts]
    assert [rollout.text for rollout in rollouts] == ["Count.", "Guess.", "So seven", "Look up."]
    assert [rollout.closed for rollout in rollouts] == [True, True, False, True]
    assert [rollout.problem.row for rollout in rollouts] == [1, 1, 2, 2]
    columns = [{**row, "trace_column": name} for row in rows for name in both]
    assert [rollout.problem.columns for rollout in rollouts] == columns
    assert rollouts[0].problem.teacher_prompt == rollouts[1].problem.teacher_prompt
    other = make_data(rows, kind=ScoringData, stage="predict", trace_columns=["other_trace"])
    assert [problem.columns["trace_column"] for problem in other.problems] == ["other_trace"] * 2


def test_students_learn_each_trace_and_hold_out_all_of_a_row(make_data: MakeData):
    rows = [{**custom_row(f"{i}?"), "other_trace": "Guess."} for i in range(6)]
    options = {"kind": StudentSFTData, "trace_columns": ["reasoning_trace", "other_trace"]}
    data = make_data(rows, **options, val_rows=2)
    assert (len(data.items), len(data.val_items)) == (8, 4)
    assert {item.row for item in data.items}.isdisjoint(item.row for item in data.val_items)
    first, second = (decode(data, item.token_ids) for item in data.items[:2])  # type: ignore[union-attr]
    assert first == second.replace("Guess.", "Count.")


def test_rows_need_all_of_the_traces(make_data: MakeData):
    whole = {**custom_row(), "other_trace": "Guess."}
    rows = [whole, custom_row(), {**whole, "other_trace": None}, {**whole, "other_trace": 7}]
    rows += [{**whole, "reasoning_trace": " "}]
    both = {"kind": ScoringData, "trace_columns": ["reasoning_trace", "other_trace"], "max_bad_frac": 0.8}
    data = make_data(rows, **both)
    assert [item.row for item in data.items] == [1, 1]
    assert {row: str(error) for row, error in data.reports[0].bad} == {
        2: "missing_column: the row lacks other_trace and has question, reasoning_trace, solution",
        3: "empty_trace: other_trace has no text",
        4: "wrong_type: other_trace must be text, but is int",
        5: "empty_trace: reasoning_trace has no text",
    }
    with pytest.raises(InputError, match=r"lacks other_trace and has question, reasoning_trace, solution"):
        make_data([custom_row()] * 2, **both)


# Rows that are longer than a sequence may be


@pytest.mark.parametrize("kind", [TeacherSFTData, StudentSFTData])
def test_long_traces_are_dropped_or_truncated_to_the_token(make_data: MakeData, tmp_path: Path, kind: Any):
    rows = [custom_row(), custom_row(trace="long " * 300), custom_row(question="long " * 600), custom_row()]
    whole: Any = make_data(rows, kind=kind).items
    limit = len(whole[1].token_ids) - 7
    options = {"kind": kind, "max_length": limit, "max_bad_frac": 0.5, "output_dir": str(tmp_path / "run")}

    def report() -> tuple[Any, ...]:
        [report] = json.loads((tmp_path / "run/data_report.json").read_text())["sources"]
        return report["num_used"], report["reasons"], report["num_truncated"], report["truncated_rows"]

    dropped = make_data(rows, **options)
    assert [item.row for item in dropped.items] == [1, 4]
    assert report() == (2, {"too_long": 2}, 0, [])

    with pytest.warns(UserWarning, match=r"1 of 4 rows of .* are cut off at data.max_length \(row 2\); see"):
        data = make_data(rows, long_traces="truncate", **options)
    assert report() == (3, {"too_long": 1}, 1, [2])  # no prompt is cut
    assert [item.row for item in data.items] == [1, 2, 4]
    assert data.items[0] == whole[0]
    cut, full = data.items[1], whole[1]
    assert isinstance(cut, SFTExample)
    assert (cut.row, cut.num_cut) == (2, 7)
    assert cut.token_ids == full.token_ids[:limit]
    assert cut.loss_mask == full.loss_mask[:limit]
    assert cut.loss_mask[-1]


# Prompts, tags and vocabularies


def test_system_prompts(make_data: MakeData):
    rows = [stratos_row(), custom_row()]

    def systems(**options: Any) -> list[str]:
        data = make_data(rows, **options)
        heads = [decode(data, problem.student_prefix) for problem in data.problems]
        return [head.split("<|im_end|>")[0].removeprefix("<|im_start|>system\n") for head in heads]

    own, default = systems()
    assert own == rows[0]["system"]
    assert default.startswith("Answer the question in two parts.")
    assert systems(student_system_prompt="Be {thought_open}") == ["Be <|begin_of_thought|>"] * 2
    data = make_data(rows, teacher_system_prompt="Teach well.")
    shown = decode(data, data.problems[0].teacher_prefix)
    assert shown.startswith("<|im_start|>system\nTeach well.<|im_end|>")


def test_only_a_student_that_lacks_tokens_gets_its_own(make_data: MakeData, smollm2: str, tmp_path: Path):
    from transformers import AutoTokenizer

    larger = AutoTokenizer.from_pretrained(smollm2)
    larger.add_tokens(["<|extra|>"])
    larger.save_pretrained(tmp_path / "larger")
    data = make_data(student_tokenizer=str(tmp_path / "larger"))
    assert data.format.student_tokenizer is data.format.tokenizer
    data = make_data(tokenizer=str(tmp_path / "larger"), student_tokenizer=smollm2)
    assert len(data.format.student_tokenizer) == len(data.format.tokenizer) - 1


# Batches


def test_held_out_rows_are_not_trained_on(make_data: MakeData):
    data = make_data(val_rows=5, prompts_per_step=4, val_batch_size=2)
    train = {item.row for item in data.items}
    val = [problem.row for batch in data.val_dataloader() for problem in batch.problems]
    assert len(val) == 5
    assert val == sorted(val)
    assert train.isdisjoint(val)
    assert train.union(val) == set(range(1, 21))
    assert [item.row for item in make_data(val_rows=5).val_items] == val
    assert [item.row for item in make_data(val_rows=5, seed=1).val_items] != val
    assert len(data.problems) == 20
    # Prediction is of every row.
    predicted = make_data(val_rows=5, stage="predict", prompts_per_step=8).predict_dataloader()
    assert [p.row for batch in predicted for p in batch.problems] == list(range(1, 21))


def test_every_process_needs_a_row_to_score(make_data: MakeData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StratosDataModule, "_world_size", lambda self: 2)
    for rows, batch_size in ((1, 2), (2, 1)):
        with pytest.raises(InputError, match=f"Each of the 2 processes needs a row to score.*are {rows} in"):
            make_data(val_rows=rows, val_batch_size=batch_size, prompts_per_step=2)
    assert make_data(val_rows=3, val_batch_size=2, prompts_per_step=2).val_items  # the last batch has one


def test_held_out_rows_of_another_source(make_data: MakeData):
    data = make_data(val_source="chains", val_rows=3)
    assert len(data.items) == 20
    assert len(data.val_items) == 3
    assert {p.question for p in data.problems[:20]}.isdisjoint(p.question for p in data.val_items)
    assert make_data().val_dataloader() == []
    with pytest.raises(InputError, match="rlt validate needs held-out rows"):
        make_data(stage="validate")


def test_a_subclass_of_a_stage_is_taken(tmp_path: Path) -> None:
    class Shouted(StudentSFTData):
        def complete(self, columns: dict[str, Any]) -> dict[str, Any]:
            if columns["answer"] == "0":
                raise BadRowError(BadRowReason.BAD_ANSWER, "a zero")
            return {**columns, "question": columns["question"].upper()}

    options = {"prompts_per_step": 4, "tags": "r1", "student_system_prompt": "", "max_bad_frac": 0.5}
    data = Shouted("chains", num_embedded_rows=20, **options)
    bare_trainer(tmp_path, steps=1).fit(SFTModule("miniature"), data)
    assert "START" in data.format.tokenizer.decode(data.items[0].token_ids)
    zeros = sum(row["answer"] == "0" for row in chain_rows(20))
    assert len(data.items) == 20 - zeros < 20
