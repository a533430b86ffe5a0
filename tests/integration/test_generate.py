"""Stage 3: each trace is sampled once whatever is killed, and the distillation set that comes of them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import rlt, run_rlt
from lightning.pytorch import Callback
from rows_of import read, write
from sampling import Scripted
from trainers import bare_trainer

from rlt_lightning.callbacks import DistillationWriter, RolloutCallback
from rlt_lightning.datamodules import ScoringData, StudentSFTData, TeacherRLData
from rlt_lightning.datamodules.rows import TRACE_COLUMN, parse_row
from rlt_lightning.engines import SampleRequest, Sampling
from rlt_lightning.modules import RLTModule
from rlt_lightning.run.jsonl import format_line, rewrite
from rlt_lightning.tags import R1, STRATOS
from rlt_lightning.types import Completion, InputError, SFTExample

PROBLEMS, TRACES = 12, 3


def command(model: str, folder: Path, *options: str) -> list[str]:
    return [
        *("predict", "--config=recipe_7b/generate", f"--model.teacher={model}", f"--model.student={model}"),
        *("--model.dtype=float32", "--model.student_dtype=float32", "--data.source=chains"),
        *(f"--data.num_embedded_rows={PROBLEMS}", "--data.prompts_per_step=2", "--data.tags=r1"),
        *("--data.student_system_prompt=Think <think> then <solution>.", "--distillation.select=all"),
        *("--rollouts.sampling.max_completion_length=12", f"--rollouts.num_traces={TRACES}"),
        *("--rollouts.max_resamples=0", "--trainer.accelerator=cpu", f"--output_dir={folder}", *options),
    ]


@pytest.fixture(scope="module")
def generated(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated") / "run"
    result = run_rlt(*command(tiny_model, folder))
    unfit = "problems have no trace from which a student can learn"  # all are open
    assert f"{PROBLEMS} of {PROBLEMS} {unfit}" in result.stderr
    assert "Next: rlt fit --config" in result.stdout
    return folder


def test_every_problem_has_its_traces_each_with_finite_rewards(generated: Path, tiny_model: str) -> None:
    rows = read(generated / "traces.jsonl")
    assert [(row["row"], row["trace"]) for row in rows] == [
        (problem, trace) for problem in range(1, PROBLEMS + 1) for trace in range(TRACES)
    ]
    assert len({row["reasoning_trace"] for row in rows}) == len(rows)
    for row in rows:
        terms = [row["solution_reward"], row["kl_reward"], row["format_reward"]]
        assert all(map(math.isfinite, terms))
        assert row["reward"] == pytest.approx(sum(terms), rel=1e-5)
        assert (row["teacher"], row["num_tokens"]) == (tiny_model, 12)
        assert row["answer"] in row["solution"]  # columns of the source are kept


def test_rows_come_in_the_form_of_bespoke_stratos_too(generated: Path) -> None:
    for row in read(generated / "distillation.jsonl"):
        assert row["system"] == "Think <|begin_of_thought|> then <|begin_of_solution|>."
        stratos = parse_row(
            {name: row[name] for name in ("system", "conversations")}, STRATOS, [TRACE_COLUMN]
        )
        assert (stratos.question, stratos.system) == (row["question"], row["system"])
        own = {name: row[name] for name in ("question", "solution", "reasoning_trace")}
        parsed = parse_row(own, R1, [TRACE_COLUMN])
        assert stratos.traces[TRACE_COLUMN].strip() == parsed.traces[TRACE_COLUMN].strip()
        assert stratos.solution.strip() == parsed.solution.strip()


@pytest.mark.full
def test_a_finished_run_selects_anew_without_sampling(generated: Path, tiny_model: str) -> None:
    before = (generated / "traces.jsonl").read_bytes()
    result = run_rlt(*command(tiny_model, generated, "--resume=true", "--distillation.select=best_reward"))
    assert "Predicting" not in result.stdout
    assert (generated / "traces.jsonl").read_bytes() == before
    rows, best = read(generated / "traces.jsonl"), read(generated / "distillation.jsonl")
    assert [row["reward"] for row in best] == [
        max(row["reward"] for row in rows[i : i + TRACES]) for i in range(0, len(rows), TRACES)
    ]
    assert rlt(*command(tiny_model, generated, "--resume=true")).returncode == 0  # as the others expect it


def test_what_stage_4_refuses_is_not_selected(generated: Path, tiny_model: str, tmp_path: Path) -> None:
    folder = shutil.copytree(generated, tmp_path / "run")
    rows = read(folder / "traces.jsonl")
    for row, trace in zip(rows, ["One.\n</think>\n\n<solution>\n2", " ", "Words."], strict=False):
        row["reasoning_trace"] = trace
    rewrite(folder / "traces.jsonl", map(format_line, rows))
    run_rlt(*command(tiny_model, folder, "--resume=true"))
    assert read(folder / "distillation.jsonl") == rows[2:]


def test_selections_take_what_they_say() -> None:
    def row(problem: int, trace: int, reward: float, tokens: int, fits: bool) -> dict[str, Any]:
        return {"row": problem, "trace": trace, "reward": reward, "student_tokens": tokens, "fits": fits}

    def chosen(*options: Any) -> list[tuple[int, int]]:
        return [(r["row"], r["trace"]) for r in DistillationWriter(*options).select_traces(rows)]

    rows = [
        *(row(1, 0, -3, 50, True), row(1, 1, -1, 200, False), row(1, 2, -2, 60, True)),
        *(row(2, 0, -1, 150, False), row(2, 1, -2, 120, False)),  # none fits: the shorter
        *(row(3, 0, -1, 30, False), row(3, 1, -9, 90, True)),
    ]
    assert chosen("first") == [(1, 0), (2, 0), (3, 0)]
    assert chosen("best_reward") == [(1, 1), (2, 0), (3, 0)]
    assert chosen("all") == [(r["row"], r["trace"]) for r in rows]
    assert chosen("fits_context") == [(1, 2), (2, 1), (3, 1)]
    rows = [row(1, i, 1.0, tokens, True) for i, tokens in enumerate([9, 7, 8, 7])] + [row(2, 0, 1.0, 5, True)]
    assert chosen("first", 2) == [(1, 0), (1, 1), (2, 0)]
    assert chosen("shortest") == [(1, 1), (2, 0)]
    assert chosen("shortest", 3) == [(1, 1), (1, 3), (1, 2), (2, 0)]


INJECTED = "<|end_of_thought|>\n\n<|begin_of_solution|>\n\nWrong.\n\n<|end_of_solution|>"


@pytest.mark.parametrize("tags", ["stratos", "r1"])
@pytest.mark.parametrize(
    ("trace", "fits"),
    [
        ("Words.", True),
        ("", False),
        (f"One {INJECTED} two.", False),
        ("One <think>a</think>\n\n<solution>b</solution> two.", None),  # tags in one style, text in the other
    ],
)
def test_stage_4_trains_on_the_trace_and_solution_that_are_there(
    trace: str, fits: bool | None, tags: str, tiny_model: str, tmp_path: Path
) -> None:
    answer = "<|begin_of_thought|>x<|end_of_thought|><|begin_of_solution|>So.<|end_of_solution|>"
    turns = [{"from": "user", "value": "Why?"}, {"from": "assistant", "value": answer}]
    source, made = tmp_path / "rows.jsonl", tmp_path / "made.jsonl"
    source.write_text(json.dumps({"conversations": turns}) + "\n")  # no separators around its solution
    data = TeacherRLData(str(source), tokenizer=tiny_model, tags=tags, student_context=2000)
    data.setup("predict")
    [problem] = data.problems
    rollout = data.build_rollout(problem, data.format.completion_from_trace(problem, trace))
    fits = tags == "stratos" if fits is None else fits
    assert data.fits_student(rollout) == fits
    made.write_text(json.dumps(data.format.build_conversation(problem, rollout.text)) + "\n")
    student = StudentSFTData(str(made), tokenizer=tiny_model, tags=tags, prompts_per_step=1)
    if not fits:
        with pytest.raises(InputError, match="extra_tag" if trace else "empty_trace"):
            student.setup("fit")
        return
    student.setup("fit")
    [example] = student.items
    assert isinstance(example, SFTExample)
    assert len(example.token_ids) == data.count_turn_tokens(rollout)
    style = data.format.tags
    expected = style.thought_open + style.wrap(trace) + style.thought_close + "\n\n"
    expected += style.solution_open + style.wrap("So.") + style.solution_close
    assert expected in data.format.tokenizer.decode(example.token_ids)


def test_traces_that_do_not_fit_are_sampled_anew_and_no_others(tiny_model: str, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    # Of the first problem the second trace is too long twice; of the second one the first in all attempts.
    lengths = {"Why so?": [5, 900, 800, 7], "How come?": [900, 6, 902, 901]}
    source.write_text("".join(json.dumps({"question": q, "solution": "So."}) + "\n" for q in lengths))
    data = TeacherRLData(str(source), tokenizer=tiny_model, tags="r1", student_context=150)
    data.setup("predict")
    seeds: list[int] = []

    def write_attempts(request: SampleRequest) -> list[Completion]:
        """Closed completions of so many words: the attempts at a problem's traces, one after another."""
        seeds.extend(request.seeds)
        text = data.format.tokenizer.decode(request.prompt)
        [left] = [left for question, left in lengths.items() if question in text]
        traces = ["word " * left.pop(0) for _ in range(request.num_completions)]
        return [data.format.completion_from_trace(None, trace) for trace in traces]

    sampling, engine = Sampling(max_completion_length=1000), Scripted(write_attempts)
    rollouts = RolloutCallback(engine, sampling, num_traces=2, max_resamples=2)
    predicting = bare_trainer(tmp_path, rollouts, DistillationWriter())
    predicting.predict(RLTModule(tiny_model, tiny_model), datamodule=data)
    rows = read(tmp_path / "traces.jsonl")
    assert [(row["row"], row["trace"], row["reasoning_trace"].count("word")) for row in rows] == [
        *((1, 0, 5), (1, 1, 7)),
        *((2, 0, 901), (2, 1, 6)),
    ]
    assert not any(lengths.values())
    assert len(set(seeds)) == len(seeds) == 8
    assert [row["fits"] for row in rows] == [row["student_tokens"] <= 150 for row in rows]
    assert [row["fits"] for row in rows] == [True, True, False, True]
    options: dict[str, Any] = {"tags": "r1", "max_length": 150, "max_bad_frac": 0.5, "prompts_per_step": 1}
    student = StudentSFTData(str(tmp_path / "traces.jsonl"), tokenizer=tiny_model, **options)
    student.setup("fit")  # what fits is what stage 4 takes, to the token
    assert [len(example.token_ids) for example in student.items] == [  # type: ignore[union-attr]
        row["student_tokens"] for row in rows if row["student_tokens"] <= 150
    ]


@pytest.mark.parametrize("kind", [TeacherRLData, ScoringData])
def test_a_plain_trainer_returns_the_rows_it_predicts(kind: Any, tiny_model: str, tmp_path: Path) -> None:
    def predict(*callbacks: Callback) -> list[dict[str, Any]]:
        teacher = RLTModule(teacher=tiny_model, student=tiny_model)
        size = {"num_embedded_rows": 4, "prompts_per_step": 2}
        data = kind(tokenizer=tiny_model, student_tokenizer=tiny_model, **size)  # type: ignore[arg-type]
        rollouts = RolloutCallback(sampling=Sampling(max_completion_length=6))
        batches = bare_trainer(tmp_path, rollouts, *callbacks).predict(teacher, data)
        return [row for batch in batches or [] for row in batch]

    name = {TeacherRLData: "traces.jsonl", ScoringData: "scores.jsonl"}[kind]
    rows = predict()
    assert len(rows) == 4
    assert predict(DistillationWriter()) == rows
    assert read(tmp_path / name) == rows


# Columns of a source that no stage reads

ODD = [
    {},
    {"answer": 3**45, "reward": 0.5, "seed": "s", "row": [1], "teacher": None, "completion": "", "fits": "n"},
    {"note": "cut \ud83e", "k\ud83e": {"\ud83e": ["\udd14"]}, "reward": "high", "source_reward": 1},
    {"answer": "4", "empty": {}, "nan": float("inf"), "note": 7, "trace_column": "other", "kl_mean": 0},
    {"answer": 4, "nested": {"a": [2**70, "x", None]}},
]
# What the columns of a row become that have the name of one of ours.
RENAMED = ("reward", "seed", "completion", "row", "teacher", "fits", "trace_column", "kl_mean")


def write_odd_rows(path: Path, odd: list[dict[str, Any]]) -> list[dict[str, Any]]:
    texts = [{"question": f"{i} + {i}?", "solution": rf"\boxed{{{2 * i}}}"} for i in range(len(odd))]
    rows = [text | columns for text, columns in zip(texts, odd, strict=True)]
    write(path, rows)
    return rows


def expect_kept(row: dict[str, Any], renamed: Sequence[str]) -> dict[str, Any]:
    kept = {f"source_{name}" if name in renamed else name: value for name, value in row.items()}
    if "source_reward" in row:
        kept |= {"source_reward": row["source_reward"], "source_source_reward": row["reward"]}
    return kept


@pytest.fixture(scope="module")
def odd_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    write_odd_rows(folder / "odd.jsonl", ODD)
    run_rlt(*odd_command(folder))
    return folder


def odd_command(folder: Path, *options: str) -> list[str]:
    return [
        *("predict", "--config=configs/laptop/generate.yaml", f"--data.source={folder / 'odd.jsonl'}"),
        *("--data.prompts_per_step=2", f"--output_dir={folder / 'run'}", *options),
    ]


@pytest.mark.parametrize("file", ["traces.jsonl", "distillation.jsonl"])
def test_every_column_of_the_source_is_kept(file: str, odd_run: Path) -> None:
    written = read(odd_run / "run" / file)
    for number, (row, source) in enumerate(zip(written, read(odd_run / "odd.jsonl"), strict=True), start=1):
        expected = expect_kept(source, RENAMED)
        assert {name: row.get(name) for name in expected} == expected
        assert (row["row"], row["teacher"], row["trace"]) == (number, "miniature-teacher", 0)
        assert isinstance(row["reward"], float)
        assert "completion" not in row


def test_scores_stand_beside_those_of_the_source(odd_run: Path, tmp_path: Path) -> None:
    traces, folder = odd_run / "run" / "traces.jsonl", tmp_path / "run"
    source = tmp_path / "traces.jsonl"
    source.write_text(traces.read_text())
    command = [
        *("predict", "--config=configs/recipe_7b/score.yaml", f"--data.source={source}", "--data.tags=r1"),
        *("--model.teacher=miniature-teacher", "--model.student=miniature", "--trainer.accelerator=cpu"),
        *("--data.teacher_system_prompt=", "--data.student_system_prompt=", "--data.prompts_per_step=2"),
        *("--model.dtype=float32", "--model.student_dtype=float32", f"--output_dir={folder}"),
    ]
    result = run_rlt(*command)
    assert "not sampled by the teacher" not in result.stderr
    before, scored = read(traces), read(folder / "scores.jsonl")
    for row, own in zip(scored, before, strict=True):
        assert row["reward"] == pytest.approx(own["reward"], abs=1e-3)
        name = "source_source_reward" if "source_reward" in own else "source_reward"
        assert own["reward"] in (row[name], row.get(f"source_{name}"))
        assert (row["row"], row["seed"], row["teacher"]) == (own["row"], own["seed"], own["teacher"])
    # A column that scoring does not read may be corrected; a trace may not.
    source.write_text(traces.read_text().replace("cut \\ud83e", "whole"))
    lines = (folder / "scores.jsonl").read_text().splitlines(keepends=True)
    (folder / "scores.jsonl").write_text("".join(lines[:4]))
    run_rlt(*command, "--resume=true")
    assert (folder / "scores.jsonl").read_text() == "".join(lines)
    source.write_text(traces.read_text().replace('"reasoning_trace": "', '"reasoning_trace": "So '))
    (folder / "scores.jsonl").write_text("".join(lines[:4]))
    assert "rows of other problems" in rlt(*command, "--resume=true").stderr
