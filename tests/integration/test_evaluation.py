"""`rlt test`: what is counted, what is written, what is kept private, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from cases import full
from commands import rlt
from fake_worker import FakeWorker
from gpqa import SECRETS, gpqa_like
from rows_of import read, write
from tiny import TINY_EVALUATION

from rlt_lightning.datamodules.evaluation import EvaluationDataModule
from rlt_lightning.datamodules.evaluation_sets import read_set
from rlt_lightning.judging.judge import Judge
from rlt_lightning.metrics import AnswerFigures
from rlt_lightning.metrics.answers import compute_set_figures, majority_accuracy, pass_at_k, standard_error
from rlt_lightning.tasks.stepwise import chain_rows
from rlt_lightning.types import InputError

Row = dict[str, Any]


def evaluate(model: str | Path, folder: Path, *options: str) -> CompletedProcess[str]:
    """`rlt test` of the shipped config at tiny size."""
    return rlt(
        "test",
        "--config=configs/recipe_7b/evaluate.yaml",
        f"--model.pretrained={model}",
        "--data.sets={chains: null}",
        "--data.max_rows=4",
        "--data.batch_size=3",
        "--rollouts.num_samples=2",
        "--rollouts.sampling.max_completion_length=8",
        "--trainer.accelerator=cpu",
        f"--output_dir={folder}",
        *options,
    )


def evaluated(model: str | Path, folder: Path, *options: str) -> Row:
    """The results of an evaluation that ends well."""
    result = evaluate(model, folder, *options)
    assert result.returncode == 0, result.stderr
    return json.loads((folder / "evaluation.json").read_text())


# Counting


def records_of(problem: int, answers: list[int | None], correct: list[bool]) -> list[Row]:
    """The records of one problem's responses: which answers are equivalent, and which are right."""
    same = {"id": f"own/{problem}", "set": "own", "formatted": True, "timed_out": False}
    same |= {"num_tokens": None, "finish_reason": None}
    rows = zip(answers, correct, strict=True)
    return [{**same, "same_answer": answer, "correct": is_right} for answer, is_right in rows]


def majority(answers: list[int | None], correct: list[bool]) -> float:
    return majority_accuracy(records_of(1, answers, correct))


def test_pass_at_1_has_a_standard_error_over_problems() -> None:
    # p = 1, 1/2, 0; mean 1/2; squares 1/4 + 0 + 1/4; / (3 * 2) = 1/12
    assert standard_error([1, 1 / 2, 0]) == pytest.approx(math.sqrt(1 / 12))
    assert math.isnan(standard_error([1 / 2]))


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_draws(k: int) -> None:
    for right in (0, 1, 3, 5):
        draws = list(itertools.combinations([True] * right + [False] * (5 - right), k))
        assert pass_at_k(right, 5, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    with pytest.raises(ValueError, match="needs 6 responses"):
        pass_at_k(1, 5, 6)


def test_majority_votes_by_equivalence_and_shares_ties() -> None:
    assert majority([0, 0, 2], [True, True, False]) == 1
    assert majority([0, 1, 1], [True, False, False]) == 0
    assert majority([0, 1], [True, False]) == 1 / 2
    assert majority([0, 1, 2], [False, True, False]) == pytest.approx(1 / 3)
    assert majority([None, None, 2], [False, False, True]) == 1  # no answer is no vote
    assert majority([None], [False]) == 0


def test_figures_are_means_over_problems_and_then_over_sets() -> None:
    records = records_of(1, [0, 0, 2, 2], [True, True, False, False])  # p = 1/2, pass@4 1, maj 1/2
    records += records_of(2, [None, 1, 1, 1], [False] * 4)  # p = 0, pass@4 0, maj 0
    other = [{**record, "id": f"other/{i}", "set": "other"} for i, record in enumerate(records[:2])]
    sets = {record["id"]: record["set"] for record in [*records, *other]}
    answers = AnswerFigures(sets)
    for part in (records[:3], other, records[3:]):  # in any order of the problems
        answers.update(part)
    found, pass_at = answers.compute()
    assert pass_at == {"own": {1: 1 / 4, 2: 5 / 12, 4: 1 / 2}, "other": {1: 1}}
    assert found["own"]["pass_at_1"] == found["own"]["maj_at_k"] == 1 / 4
    assert found["own"]["pass_at_k"] == 1 / 2
    assert found["own"]["standard_error"] == 1 / 4  # sqrt((1/16 + 1/16) / (2 * 1))
    assert found["other"]["pass_at_1"] == 1
    assert found["overall"]["pass_at_1"] == 5 / 8
    assert found["overall"]["standard_error"] == 1 / 8
    assert "tokens_mean" not in found["own"]
    assert math.isnan(compute_set_figures([])["pass_at_1"])
    without_answer = records_of(3, [0, None], [True, False])
    assert compute_set_figures(without_answer)["pass_at_1"] == 1 / 2


# Reference solutions as responses. No set has an exception among its own solutions. Where another problem's
# answer is right too, the answers are the same, but for these, which math_verify takes for equivalent.

EQUIVALENT = {"math500": {("5", "x=5"), ("x=5", "5")}}


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(deadline_s=30.0) as judge:
        yield judge


@pytest.mark.parametrize(
    ("name", "size"), [("aime24", 30), ("amc23", 40), full("math500", 500), full("gsm8k", 1319)]
)
def test_reference_solutions_are_right_and_others_wrong(
    name: str, size: int, shared: Path, judge: Judge
) -> None:
    rows = read(shared / "data" / name / "test.jsonl")
    questions = read_set(name, str(shared / "data" / name), None, 0)
    assert len(questions) == len({question.id for question in questions}) == size
    references = [question.reference for question in questions]
    responses = [
        row.get("solution") or (row["answer"] if name == "gsm8k" else f"It is \\boxed{{{row['answer']}}}.")
        for row in rows
    ]
    verdicts = judge.judge_all(zip(responses, references, strict=True))
    assert [question.id for question, v in zip(questions, verdicts, strict=True) if not v.correct] == []

    answers = [str(reference["answer"]) for reference in references]
    shift = random.Random(f"another problem of {name}").randrange(1, size)
    others = responses[shift:] + responses[:shift]
    verdicts = judge.judge_all(zip(others, references, strict=True))
    pairs = {
        (answer, other)
        for answer, other, verdict in zip(answers, answers[shift:] + answers[:shift], verdicts, strict=True)
        if verdict.correct and answer != other
    }
    assert pairs <= EQUIVALENT.get(name, set())

    numbers = [i for i, answer in enumerate(answers) if answer.replace(",", "").isdigit()]
    assert len(numbers) > size / 2
    plus_one = [f"It is \\boxed{{{int(answers[i].replace(',', '')) + 1}}}." for i in numbers]
    verdicts = judge.judge_all(zip(plus_one, [references[i] for i in numbers], strict=True))
    assert not any(verdict.correct for verdict in verdicts)


# Runs


@pytest.fixture(scope="module")
def finished(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation") / "run"
    evaluated(tiny_model, folder)
    return folder


def test_an_evaluation_leaves_table_figures_and_records(finished: Path, tiny_model: str) -> None:
    summary = json.loads((finished / "evaluation.json").read_text())
    assert summary["model"] == tiny_model
    assert summary["rollouts"]["sampling"]["max_completion_length"] == 8
    assert (summary["rollouts"]["seed"], summary["data_seed"]) == (0, 0)
    found = summary["sets"]["chains"]
    assert (found["num_problems"], found["num_samples"], found["tokens_mean"]) == (4, 2, 8)
    assert found["pass_at"].keys() == {"1", "2"}
    assert found["prompt"].endswith("<|im_start|>assistant\n")
    [row] = chain_rows(1, seed=0, split="test")
    assert f"user\n{row['question']}<|im_end|>" in found["prompt"]  # as students are trained on it
    assert summary["overall"] is None
    records = read(finished / "responses.jsonl")
    assert [(r["id"], r["sample"]) for r in records] == [
        (f"chains/{row}", sample) for row in range(1, 5) for sample in range(2)
    ]
    assert len({r["response"] for r in records}) == 8
    page = (finished / "evaluation.md").read_text()
    assert "| last-digit chains | 4        | 2 |" in page
    assert re.fullmatch(r"rlt_lightning \S+, math-verify \S+", summary["judge"])
    assert f"Judged by {summary['judge']}." in page


def test_a_judge_that_cannot_start_ends_before_sampling(tiny_model: str, tmp_path: Path) -> None:
    temporary = tmp_path / ("long" * 30)  # a socket's path has 107 bytes at most
    temporary.mkdir()
    words = [
        "--config=laptop/evaluate",
        f"--model.pretrained={tiny_model}",
        f"--output_dir={tmp_path / 'run'}",
    ]
    result = rlt("test", *words, *TINY_EVALUATION, fresh=True, TMPDIR=str(temporary))
    assert result.returncode == 2, result.stderr
    assert "TMPDIR" in result.stderr.splitlines()[-1]
    assert "loading" not in result.stderr


def test_a_resumed_run_refuses_other_problems(tiny_model: str, tmp_path: Path) -> None:
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(4)]
    source, run = tmp_path / "rows.jsonl", tmp_path / "run"
    options = [f"--data.sets={{own: {source}}}"]
    write(source, rows)
    evaluated(tiny_model, run, *options)
    for other in (rows[::-1], [*rows[:3], rows[3] | {"answer": "5"}]):
        write(source, other)
        (run / "evaluation.json").unlink(missing_ok=True)
        refused = evaluate(tiny_model, run, *options, "--resume=true")
        assert refused.returncode == 2
        assert "has a response to another own/" in refused.stderr


def test_a_killed_run_goes_on_and_samples_nothing_twice(
    finished: Path, tiny_model: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "evaluation.json").unlink()
    whole = (finished / "responses.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    marked = [line.replace('"response": "', '"response": "kept ') for line in lines[:3]]
    (run / "responses.jsonl").write_text(
        "".join([*marked, lines[3][:20]])
    )  # problem 2 has one and a torn one
    summary = evaluated(tiny_model, run, "--resume=true")
    assert (run / "responses.jsonl").read_text() == "".join([*marked[:2], *lines[2:]])
    assert summary["sets"]["chains"]["num_problems"] == 4

    before = (run / "evaluation.json").read_text()
    (run / "evaluation.json").unlink()
    evaluated(tiny_model, run, "--resume=true")  # nothing is left but to write the results
    assert (run / "evaluation.json").read_text() == before
    changed = evaluate(tiny_model, run, "--resume=true", "--rollouts.seed=1")
    assert "rollouts.seed was 0 and is 1" in changed.stderr


@pytest.mark.parametrize(("devices", "overlay"), [(2, ""), full(3, "fsdp2"), full(2, "zero3")])
def test_several_processes_leave_the_files_of_one(
    devices: int, overlay: str, finished: Path, tiny_model: str, tmp_path: Path
) -> None:
    # Of batches of 3 and 1 problems, the last process has parts of one and of none.
    files = ("responses.jsonl", "evaluation.json", "evaluation.md")
    ranks = [f"--trainer.devices={devices}"]
    ranks += [f"--config=configs/hardware/{overlay}.yaml"] if overlay else []
    evaluated(tiny_model, tmp_path / "run", *ranks)
    assert all((tmp_path / "run" / name).read_text() == (finished / name).read_text() for name in files)

    resumed = tmp_path / "resumed"
    shutil.copytree(finished, resumed)
    (resumed / "evaluation.json").unlink()
    whole = (finished / "responses.jsonl").read_text()
    (resumed / "responses.jsonl").write_text(whole[: len(whole) // 2])
    evaluated(tiny_model, resumed, "--resume=true", *ranks)
    assert all((resumed / name).read_text() == (finished / name).read_text() for name in files)


def test_rows_of_another_judge_are_not_resumed(finished: Path, tiny_model: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    rows = read(finished / "responses.jsonl")
    data = partial(EvaluationDataModule, {"chains": None}, tiny_model, max_rows=4, num_samples=2)
    write(run / "responses.jsonl", [rows[0], rows[1] | {"judge": "another 1.0"}])
    with pytest.raises(InputError, match=r"judge .*responses\.jsonl is by another 1\.0, .*--output_dir"):
        data(output_dir=str(run)).setup("test")
    write(run / "responses.jsonl", rows[:3])
    resumed = data(output_dir=str(run))
    resumed.setup("test")
    assert resumed.finished == rows[:2]


def test_a_worker_that_serves_the_model_spares_loading_it(tiny_model: str, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    with FakeWorker(dev_mode=False, endings=("length",)) as worker:
        engine = "{class_path: rlt_lightning.engines.VLLMEngine, init_args: {urls: [%s], push: %s}}"
        push = "rlt_lightning.engines.NoPush"
        option = f"--rollouts.engine={engine % (worker.url, push)}"
        summary = evaluated(folder, tmp_path / "run", option)
        assert {body["max_tokens"] for body in worker.bodies} == {8}
    assert summary["rollouts"]["engine"] == "VLLMEngine"
    assert len(read(tmp_path / "run" / "responses.jsonl")) == 8


# GPQA's authors ask that its rows stay out of plain text


def everything_in(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


def test_nothing_of_gpqa_is_written_or_shown(tiny_model: str, tmp_path: Path) -> None:
    path = gpqa_like(tmp_path / "rows.jsonl")
    options = [f"--data.sets={{gpqa_diamond: {path}}}"]
    result = evaluate(tiny_model, tmp_path / "run", *options)
    assert result.returncode == 0, result.stderr
    records = read(tmp_path / "run" / "responses.jsonl")
    assert {record["id"] for record in records} == {f"gpqa_diamond/rec{i}" for i in range(3)}
    assert all("response" not in record for record in records)
    written = everything_in(tmp_path / "run") + result.stdout + result.stderr
    assert [secret for secret in SECRETS if secret in written] == []


def test_gpqas_errors_quote_no_row(tiny_model: str, tmp_path: Path) -> None:
    path = gpqa_like(tmp_path / "rows.jsonl")
    rows = read(path)
    rows[1]["Incorrect Answer 2"] = ""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"Question": "zebrafinch')
    result = evaluate(tiny_model, tmp_path / "run", f"--data.sets={{gpqa_diamond: {path}}}")
    assert result.returncode == 2
    assert "2 of 4" in result.stderr
    assert "it lacks Incorrect Answer 2" in result.stderr
    assert [secret for secret in SECRETS if secret in result.stdout + result.stderr] == []


def test_options_are_shuffled_by_the_seed_and_the_letter_follows(tmp_path: Path) -> None:
    source = str(gpqa_like(tmp_path / "rows.jsonl", num_rows=24))
    questions = read_set("gpqa_diamond", source, None, seed=0)
    for i, question in enumerate(questions):
        assert f"{question.reference['answer']}) quokka {i}" in question.question
    letters = [question.reference["answer"] for question in questions]
    assert set(letters) == set("ABCD")
    assert questions == read_set("gpqa_diamond", source, None, seed=0)
    assert letters != [q.reference["answer"] for q in read_set("gpqa_diamond", source, None, seed=1)]


# Bad input: one line each


def test_the_sets_keep_their_own_ids(tmp_path: Path) -> None:
    own = [{"unique_id": "algebra/7", "problem": "1+1?", "answer": 2}, {"problem": "1+2?", "answer": "3"}]
    own[1]["unique_id"] = "algebra/8"
    assert [q.id for q in read_set("math500", str(write(tmp_path / "a.jsonl", own)), None, 0)] == [
        "math500/algebra/7",
        "math500/algebra/8",
    ]
    own[1]["unique_id"] = "algebra/7"  # twice: numbers then
    assert [q.id for q in read_set("math500", str(write(tmp_path / "b.jsonl", own)), None, 0)] == [
        "math500/1",
        "math500/2",
    ]
