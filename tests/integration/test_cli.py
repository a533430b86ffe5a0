"""The command line as users meet it: run folders, crashes and resumes, bad input, start-up time."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
import yaml
from commands import rlt, run_rlt, start
from fake_worker import worker_of
from fits import assert_one_clear_line, explanation, metrics, sampled_by, small_fit, weights
from kills import wait_for
from safetensors.torch import load_file

from rlt_lightning.__main__ import main
from rlt_lightning.models.embedded import resolve
from rlt_lightning.tasks.stepwise import chain_rows


@pytest.fixture(scope="module")
def short_config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An overlay that makes completions short and moves the reference every second step."""
    path = tmp_path_factory.mktemp("config") / "short.yaml"
    callbacks = [{"class_path": "rlt_lightning.callbacks.ReferenceSync", "init_args": {"every_n_steps": 2}}]
    rollouts = {"sampling": {"max_completion_length": 6}}
    trainer = {"callbacks": callbacks, "max_steps": 7}
    path.write_text(yaml.safe_dump({"trainer": trainer, "rollouts": rollouts}))
    return f"--config={path}"


def test_a_fit_leaves_the_whole_run_folder(finished_run: Path) -> None:
    run = finished_run
    stdout, stderr = ((run.parent / name).read_text() for name in ("stdout", "stderr"))
    assert str(run / "model") in stdout
    assert f"rlt predict --config laptop/generate --model.teacher {run / 'model'}" in stdout
    assert "--data.tags" not in stdout  # r1, as that config has it
    assert stderr.count("loading miniature") == 3  # the trained model, the student and the reference
    assert "policy/loss=" in stdout
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["init_args"]["reward"]["init_args"]["kl_weight"] == 3.0  # defaults are resolved
    assert config["model"]["init_args"]["teacher"] == "miniature-teacher"
    assert metrics(run).keys() == {1, 2}
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").open()]
    assert len(rows) == 2 * 2 * 2  # steps, problems, completions
    for row in rows:
        parts = row["solution_reward"] + row["kl_reward"] + row["format_reward"]
        assert row["reward"] == pytest.approx(parts, abs=1e-4)
        assert row["explanation"] is not None
    with_tokens = [row for row in rows if "thought_tokens" in row]
    assert {row["row"] for row in with_tokens} == {row["row"] for row in rows}  # the best and worst of two
    for row in with_tokens:
        assert "".join(row["thought_tokens"]).strip() == row["explanation"]
        assert "".join(row["solution_tokens"]) == row["solution"].strip("\n")
        assert sum(row["solution_log_probs"]) / len(row["solution_log_probs"]) == pytest.approx(
            row["solution_log_prob_mean"], abs=1e-4
        )
        assert max(row["thought_kl"]) == pytest.approx(row["kl_max"], abs=1e-4)
    assert metrics(run)[1]["reward/mean"] == pytest.approx(
        sum(row["reward"] for row in rows if row["step"] == 1) / 4, abs=1e-4
    )
    before = load_file(Path(resolve("miniature-teacher")) / "model.safetensors")
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(run).items())
    assert "miniature-teacher" in (run / "model" / "README.md").read_text()


def test_a_runs_config_repeats_the_run(tiny_model: str, short_config: str, tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    options = [short_config, "--config=configs/add/tensorboard.yaml", "--resume=true"]
    for steps in (1, 2):  # the second resumes
        result = run_rlt(*small_fit(tiny_model, first, *options, f"--trainer.max_steps={steps}"))
    written = sorted(first.rglob("*"))
    result = rlt("fit", f"--config={first / 'config.yaml'}")
    assert_one_clear_line(result, "must be empty or new")
    run_rlt("fit", f"--config={first / 'config.yaml'}", f"--output_dir={again}")
    assert metrics(again) == metrics(first)
    assert list(again.rglob("events.out.tfevents.*"))
    assert sorted(first.rglob("*")) == written


@pytest.mark.full
def test_two_processes_sample_at_the_same_workers_as_one(
    tiny_model: str, short_config: str, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with worker_of(tiny_model) as first, worker_of(tiny_model) as second:
        options = [
            short_config,
            "--trainer.max_steps=3",
            "--data.val_rows=2",
            "--trainer.val_check_interval=2",
        ]
        options += sampled_by(first.url, second.url)
        options += ["--rollouts.asynchronous=true", "--model.max_staleness=1"]
        assert rlt(*small_fit(tiny_model, one, *options)).returncode == 0
        asked = len(first.delivered) + len(second.delivered)
        run_rlt(*small_fit(tiny_model, two, *options, "--trainer.devices=2", "--trainer.strategy=ddp"))
        assert len(first.delivered) + len(second.delivered) == 2 * asked  # each prompt once, for both ranks
    rows = [{line for line in map(explanation, (f / "rollouts.jsonl").open())} for f in (one, two)]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 3 * 2 * 2  # steps, problems, completions
    for name in ("reward/mean", "rollout/mismatch_mean", "rollout/mismatch_max", "rollout/staleness"):
        assert metrics(two)[2][name] == pytest.approx(metrics(one)[2][name], rel=1e-3), name


def test_a_half_written_checkpoint_is_not_chosen(tmp_path: Path) -> None:
    from rlt_lightning.checkpoints.folder import find_checkpoint

    for name in ("step=000002.ckpt", "step=000010.ckpt", "step=000011.ckpt.tmp"):
        (tmp_path / name).touch()
    assert find_checkpoint(tmp_path).name == "step=000010.ckpt"
    for name, parts in (("step=000012.ckpt.old", ["state.pt"]), ("step=000013.ckpt.old", ["weights"])):
        (tmp_path / name).mkdir()
        for part in parts:
            (tmp_path / name / part).touch()
    assert find_checkpoint(tmp_path).name == "step=000012.ckpt"  # was whole, and about to be replaced


def test_a_crash_while_a_checkpoint_is_replaced_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlt_lightning.checkpoints.folder import find_checkpoint, read_state, write_checkpoint

    folder, replace = tmp_path / "step=000001.ckpt", os.replace
    write_checkpoint(folder, {"model": "old"}, {})

    def crash(source: Path, target: Path) -> None:
        if Path(source).suffix == ".tmp":
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            write_checkpoint(folder, {"model": "new"}, {})
    assert read_state(find_checkpoint(tmp_path)) == {"model": "old"}
    write_checkpoint(folder, {"model": "new"}, {})
    assert read_state(find_checkpoint(tmp_path)) == {"model": "new"}
    assert list(tmp_path.iterdir()) == [folder]


def test_sft_trains_packed_and_resumes_exactly(tiny_model: str, tmp_path: Path) -> None:
    arguments = [
        "fit",
        "--config=configs/recipe_7b/warmup.yaml",
        f"--model.pretrained={tiny_model}",
        "--model.optimizer.lr=3e-3",
        "--data.source=chains",
        "--data.num_embedded_rows=24",
        "--data.prompts_per_step=4",
        "--data.val_rows=4",
        "--trainer.precision=32-true",
        "--trainer.max_epochs=2",
        "--checkpoint.every_n_train_steps=1",
        "--trainer.accelerator=cpu",
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_rlt(*arguments, f"--output_dir={whole}")
    process = start(*arguments, f"--output_dir={killed}")
    wait_for((killed / "checkpoints" / "step=000003.ckpt").exists, process)
    process.kill()
    process.wait()
    run_rlt(*arguments, f"--output_dir={killed}", "--ckpt_path=last")
    expected, found = metrics(whole), metrics(killed)
    assert found.keys() == expected.keys()
    for step, row in expected.items():
        assert found[step] == pytest.approx(row, abs=1e-6), step
    # 10 steps, warm-up round(0.05 * 10) = 0 of them: half a cosine from the peak of 3e-3.
    for step, row in expected.items():
        cosine = 3e-3 * 0.5 * (1 + math.cos(math.pi * (step - 1) / 10))
        assert row["policy/lr"] == pytest.approx(cosine, rel=1e-5)
    losses = [row["policy/loss"] for _, row in sorted(expected.items())]
    assert losses[-1] < losses[0] - 0.3
    assert "policy/val_loss" in expected[max(expected)]


@pytest.mark.full
def test_resume_replaces_a_dead_start_and_no_results(tiny_model: str, tmp_path: Path) -> None:
    folder, rows = tmp_path / "run", tmp_path / "rows.jsonl"
    row = {"question": "Twice 2?", "solution": "4", "reasoning_trace": "2 + 2."}
    rows.write_text(json.dumps(row) + "\n")
    models = [f"--model.teacher={tiny_model}", f"--model.student={tiny_model}", f"--data.source={rows}"]
    score = [
        "predict",
        "--config=configs/recipe_7b/score.yaml",
        *models,
        f"--output_dir={folder}",
        "--resume=true",
    ]
    folder.mkdir()
    for name in ("config.yaml", "config.tmp", "data_report.json", ".writable"):
        (folder / name).write_text("half: [writt")  # killed before the first row
    run_rlt(*score)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    mistaken = rlt("fit", "--config=tests/rlt.yaml", f"--output_dir={folder}", "--resume=true")
    [line] = mistaken.stderr.strip().splitlines()
    assert mistaken.returncode == 2
    assert f"does not replace {folder / 'scores.jsonl'}" in line
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (folder / "scores.jsonl").unlink()
    (folder / "model").mkdir()
    assert f"does not replace {folder / 'model'}" in rlt(*score).stderr


@pytest.mark.full
def test_a_seed_sets_all_but_those_that_are_options(tiny_model: str, tmp_path: Path) -> None:
    # A seed option wins before and after --seed; a config does not.
    (tmp_path / "seeds.yaml").write_text("rollouts: {seed: 5}")
    options = [f"--config={tmp_path / 'seeds.yaml'}", "--rollouts.sampling.max_completion_length=4"]
    for seed in ("7", "8"):
        seeds = ["--data.seed=3", f"--seed={seed}", "--model.init_args.seed=4", "--trainer.max_steps=2"]
        run_rlt(*small_fit(tiny_model, tmp_path / seed, *options, *seeds))
    config = yaml.safe_load((tmp_path / "7" / "config.yaml").read_text())
    assert config["seed_everything"] == config["rollouts"]["seed"] == 7
    assert config["data"]["init_args"]["seed"] == 3
    assert config["model"]["init_args"]["seed"] == 4
    assert metrics(tmp_path / "7") != metrics(tmp_path / "8")


def test_an_interrupt_before_a_run_begins_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlt_lightning.cli.main.run", run)
    monkeypatch.setattr(sys, "argv", ["rlt", "fit", "--config=laptop/rlt"])
    monkeypatch.setattr(sys, "path", [*sys.path])  # it adds the current folder
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code == 130


def test_other_rows_at_the_same_path_are_refused(tiny_model: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"

    def read_steps() -> int:
        return int(yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["trainer"]["max_steps"])

    def fit(steps: int) -> tuple[int, str]:
        options = [f"--data.source={rows}", f"--trainer.max_steps={steps}"]
        ended = rlt(*small_fit(tiny_model, tmp_path / "run", *options, "--resume=true"))
        return ended.returncode, ended.stderr

    rows.write_text("".join(json.dumps(row) + "\n" for row in chain_rows(10, seed=1)))
    assert fit(1)[0] == 0
    first = rows.read_text()
    rows.write_text("".join(sorted(first.splitlines(keepends=True))))
    status, said = fit(2)
    assert (status, said.count(f"the training rows of {rows}")) == (2, 1), said
    assert read_steps() == 1
    rows.write_text(first)
    assert fit(2)[0] == 0
    assert read_steps() == 2
