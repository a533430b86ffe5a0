"""`rlt predict` on several processes and after kills writes the same files as on one, byte for byte."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from random import Random

import pytest
from cases import full
from commands import rlt, run_rlt, start, wait_until
from fake_worker import worker_of
from fits import assert_one_clear_line
from kills import processes, send_sigterm, wait_for
from rows_of import read, write

# Explanations of the pretrained teacher, of which some are too long for the student and sampled again. Of
# batches of 2, 2, 2 and 1 problems two processes have two each, and the third of three has one and a spare.
GENERATE = [
    *("predict", "--config=configs/laptop/generate.yaml", "--model.teacher=miniature-teacher"),
    *("--data.num_embedded_rows=7", "--data.prompts_per_step=2", "--data.student_context=60"),
    *(
        "--rollouts.num_traces=2",
        "--rollouts.max_resamples=2",
        "--rollouts.sampling.max_completion_length=48",
    ),
    *("--distillation.select=all", "--trainer.accelerator=cpu"),
]
ANSWERS = [
    *("predict", "--config=configs/laptop/rejection.yaml", "--data.num_embedded_rows=7"),
    *("--data.prompts_per_step=2", "--rollouts.num_traces=4", "--trainer.accelerator=cpu"),
]
RANKS = {
    "ddp": ["--trainer.devices=2"],
    "ddp_3": ["--trainer.devices=3"],
    "fsdp2": ["--trainer.devices=2", "--config=configs/hardware/fsdp2.yaml"],
    "fsdp2_3": ["--trainer.devices=3", "--config=configs/hardware/fsdp2.yaml"],
    "zero3": ["--trainer.devices=2", "--config=configs/hardware/zero3.yaml"],
}


def predict(folder: Path, *options: str) -> Path:
    run_rlt(*options, f"--output_dir={folder}")
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    """What a prediction leaves, beside settings and machine."""
    names = ("traces.jsonl", "scores.jsonl", "distillation.jsonl", "README.md")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return predict(tmp_path_factory.mktemp("generated") / "run", *GENERATE)


def test_some_traces_were_sampled_again(generated: Path) -> None:
    rows = read(generated / "traces.jsonl")
    assert {row["row"]: row["fits"] for row in rows}.keys() == set(range(1, 8))
    seeds = {(row["row"], row["seed"]) for row in rows}
    assert 7 < len(seeds) < 14


@pytest.mark.parametrize("ranks", ["ddp", full("fsdp2_3"), full("zero3")])
def test_several_processes_leave_the_files_of_one(ranks: str, generated: Path, tmp_path: Path) -> None:
    found = predict(tmp_path / "run", *GENERATE, *RANKS[ranks])
    assert read_files(found) == read_files(generated)
    assert len(read_files(found)) == 3


@pytest.mark.parametrize("ranks", ["ddp", full("fsdp2")])
def test_a_killed_run_goes_on_with_its_first_unfinished_batch(
    ranks: str, generated: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = start(*GENERATE, *RANKS[ranks], f"--output_dir={folder}")
    traces = folder / "traces.jsonl"
    wait_for(lambda: traces.exists() and traces.stat().st_size > 0, run)
    run.killpg()
    run.wait()
    # As if the kill had come within a write: of the second batch one problem is there, and half of another.
    lines = (generated / "traces.jsonl").read_text().splitlines(keepends=True)
    traces.write_text("".join(lines[:7]) + lines[7][:30])
    predict(folder, *GENERATE, *RANKS[ranks], "--resume=true")
    assert read_files(folder) == read_files(generated)


@pytest.mark.parametrize(
    ("ranks", "to", "status"),
    [
        ("ddp", "the group", 143),
        full("fsdp2", "rank 0", 143),
        full("zero3", "the group twice", 143),
        full("one", "Ctrl-C", 130),
        full("ddp", "Ctrl-C", 130),
    ],
)
def test_signals_end_all_ranks_and_keep_rows(
    ranks: str, to: str, status: int, generated: Path, tmp_path: Path
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    words = [*GENERATE, *RANKS.get(ranks, ()), f"--output_dir={folder}"]
    run = start(*words, log=log)
    wait_for(lambda: (folder / "traces.jsonl").exists(), run)
    if to == "Ctrl-C":
        os.killpg(run.pid, signal.SIGINT)
    else:
        send_sigterm(run, to, Random(0))
    assert run.wait(30) == status, log.read_text()
    wait_until(lambda: not processes(run))
    ended = "interrupted" if to == "Ctrl-C" else "terminated"
    assert log.read_text().count(f"rlt: {ended}. Rows that are written are kept.") == 1
    run_rlt(*words, "--resume=true")
    assert read_files(folder) == read_files(generated)


def test_a_batch_that_was_cut_is_scored_as_a_whole(generated: Path, tmp_path: Path) -> None:
    shutil.copytree(generated, tmp_path / "run")
    lines = (generated / "traces.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "traces.jsonl").write_text("".join(lines[:6]))  # three problems of batches of two
    result = rlt(*GENERATE, f"--output_dir={tmp_path / 'run'}", "--resume=true")
    assert "/3 [" in result.stdout  # two of the batches were left to be made, and a half
    assert read_files(tmp_path / "run") == read_files(generated)


@pytest.mark.parametrize("ranks", ["ddp", full("fsdp2")])
def test_scores_are_those_of_one(ranks: str, generated: Path, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    rows = read(generated / "traces.jsonl")[::2]
    names = ("question", "solution", "reasoning_trace")
    texts = [{name: row[name] for name in names} | {"other": "Nobody knows."} for row in rows]
    write(source, texts)
    options = ["predict", "--config=configs/recipe_7b/rank.yaml", "--model.teacher=miniature-teacher"]
    options += ["--model.student=miniature", f"--data.source={source}", "--data.prompts_per_step=3"]
    options += ["--data.teacher_system_prompt=", "--data.student_system_prompt=", "--trainer.accelerator=cpu"]
    options += ["--data.trace_columns=[reasoning_trace, other]", "--distillation.per_token=true"]
    one = predict(tmp_path / "one", *options)
    found = predict(tmp_path / ranks, *options, *RANKS[ranks])
    assert read_files(found) == read_files(one)
    assert "scores.jsonl" in read_files(one)


@pytest.mark.parametrize("ranks", [full("ddp_3"), "fsdp2"])
def test_answers_and_their_verdicts_are_those_of_one(ranks: str, tmp_path: Path) -> None:
    one = predict(tmp_path / "one", *ANSWERS)
    assert read_files(predict(tmp_path / ranks, *ANSWERS, *RANKS[ranks])) == read_files(one)


@pytest.mark.parametrize("ranks", [full("ddp_3"), full("fsdp2")])
def test_a_workers_traces_are_those_of_one(ranks: str, tiny_model: str, tmp_path: Path) -> None:
    # Rank 0 asks the worker for all, each process for another number of traces again.
    options = [*GENERATE, f"--model.teacher={tiny_model}", f"--model.student={tiny_model}"]
    options += ["--data.prompts_per_step=3", "--data.student_context=400", "--rollouts.engine=VLLMEngine"]
    options += ["--rollouts.engine.push=rlt_lightning.engines.IPCPush"]
    found = []
    for name, more in (("one", []), (ranks, RANKS[ranks])):
        with worker_of(tiny_model) as worker:
            folder = tmp_path / name
            predict(folder, *options, f"--rollouts.engine.urls=[{worker.url}]", *more)
        found.append(read_files(folder))
    assert found[0] == found[1]


# Scores of given traces

ROWS = [
    {
        "question": f"What is {n} + {n}?",
        "solution": str(2 * n),
        "reasoning_trace": f"{n} and {n}: {2 * n}.",
        "id": n,
    }
    for n in range(1, 10)
]


def command(config: str, model: str, source: Path, folder: Path, *options: str) -> list[str]:
    models = [f"--model.teacher={model}", f"--model.student={model}"]
    where = [f"--data.source={source}", f"--output_dir={folder}"]
    return ["predict", f"--config=recipe_7b/{config}", *models, *where, *options]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "rows.jsonl", ROWS)


def test_scoring_goes_on_after_the_last_whole_row(tiny_model: str, source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    whole = command("score", tiny_model, source, folder, "--data.prompts_per_step=1")
    assert rlt(*whole).returncode == 0
    scores = folder / "scores.jsonl"
    before = scores.read_text()
    lines = before.splitlines(keepends=True)
    scores.write_text("".join(lines[:4]) + lines[4][:20])
    result = run_rlt(*whole, "--resume=true")
    assert " 5/5 [" in result.stdout  # what is missing, and no more
    assert scores.read_text() == before


@pytest.mark.full
def test_scores_of_other_rows_or_settings_are_not_gone_on_with(
    tiny_model: str, source: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    whole = command("score", tiny_model, source, folder)
    assert rlt(*whole).returncode == 0
    before = (folder / "scores.jsonl").read_bytes()
    texts = rlt(*whole, "--resume=true", "--distillation.per_token=true")
    assert "distillation.per_token was False and is True" in texts.stderr
    for rows in ([{**ROWS[0], "solution": "7"}, *ROWS[1:]], ROWS[:-1]):
        write(source, rows)
        refused = rlt(*whole, "--resume=true")
        assert_one_clear_line(refused, "has rows of other problems. Restore data.source")
    assert (folder / "scores.jsonl").read_bytes() == before
