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
from cases import full
from commands import ROOT, rlt, start
from fake_worker import FakeWorker, worker_of
from fits import assert_one_clear_line, explanation, metrics, small_fit, wait_for

from rlt_lightning.__main__ import main
from rlt_lightning.models.embedded import resolve
from rlt_lightning.strategies.zero import DeepSpeed
from rlt_lightning.types import InputError


@pytest.fixture(scope="module")
def short_config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An overlay that makes completions short and moves the reference every second step."""
    path = tmp_path_factory.mktemp("config") / "short.yaml"
    callbacks = [
        {"class_path": "rlt_lightning.callbacks.ReferenceSync", "init_args": {"every_n_steps": 2}},
    ]
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
    roles = {
        "the trained model": "miniature-teacher",
        "the frozen student": "miniature",
        "the reference": "miniature-teacher",
    }
    for role, model in roles.items():
        assert f"loading {model} (0.7 MB) as float32: {role}\n" in stderr
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
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert tokenizer.chat_template
    start = AutoModelForCausalLM.from_pretrained(resolve("miniature-teacher")).state_dict()
    assert any(not torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())
    card = (run / "model" / "README.md").read_text()
    assert "miniature" in card
    assert "chains" in card


def test_a_runs_config_repeats_the_run(tiny_model: str, short_config: str, tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    options = [short_config, "--config=configs/add/tensorboard.yaml", "--resume=true"]
    for steps in (1, 2):  # the second resumes
        result = rlt(*small_fit(tiny_model, first, *options, f"--trainer.max_steps={steps}"))
        assert result.returncode == 0, result.stderr
    written = sorted(first.rglob("*"))
    result = rlt("fit", f"--config={first / 'config.yaml'}")
    assert_one_clear_line(result, "must be empty or new")
    result = rlt("fit", f"--config={first / 'config.yaml'}", f"--output_dir={again}")
    assert result.returncode == 0, result.stderr
    assert metrics(again) == metrics(first)
    assert list(again.rglob("events.out.tfevents.*"))
    assert sorted(first.rglob("*")) == written


@pytest.mark.full
def test_two_processes_with_unequal_lengths_equal_one(
    tiny_model: str, short_config: str, tmp_path: Path
) -> None:
    # Prompts differ in length: at 150 tokens a micro-batch, the ranks have different numbers of them.
    one, two = tmp_path / "one", tmp_path / "two"
    options = [short_config, "--trainer.max_steps=3", "--model.micro_batch_tokens=150"]
    result = rlt(*small_fit(tiny_model, one, *options))
    assert result.returncode == 0, result.stderr
    options += ["--trainer.devices=2", "--trainer.strategy=ddp"]
    result = rlt(*small_fit(tiny_model, two, *options), fresh=True)  # as Lightning starts them
    assert result.returncode == 0, result.stderr
    assert result.stderr.startswith("waiting for rank 1 to start\n")
    assert result.stderr.count("loading ") == 3  # only rank 0 says it
    for step, row in metrics(one).items():
        # Adam turns rounding of near-zero gradients into whole updates: later steps agree less closely.
        bound = 1e-5 if step == 1 else 1e-3
        for name in ("reward/mean", "policy/entropy", "policy/grad_norm", "student/kl_mean"):
            expected = pytest.approx(row[name], rel=bound, abs=bound / 10)
            assert metrics(two)[step][name] == expected, (step, name)
    rows = [{line for line in map(explanation, (f / "rollouts.jsonl").open())} for f in (one, two)]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 3 * 2 * 2  # steps, problems, completions


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
        options += ["--rollouts.engine=rlt_lightning.engines.VLLMEngine"]
        options += [f"--rollouts.engine.urls=[{first.url},{second.url}]"]
        options += ["--rollouts.engine.push=rlt_lightning.engines.IPCPush"]
        options += ["--rollouts.asynchronous=true", "--model.max_staleness=1"]
        assert rlt(*small_fit(tiny_model, one, *options)).returncode == 0
        asked = len(first.delivered) + len(second.delivered)
        result = rlt(*small_fit(tiny_model, two, *options, "--trainer.devices=2", "--trainer.strategy=ddp"))
        assert result.returncode == 0, result.stderr
        assert len(first.delivered) + len(second.delivered) == 2 * asked  # each prompt once, for both ranks
    rows = [{line for line in map(explanation, (f / "rollouts.jsonl").open())} for f in (one, two)]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 3 * 2 * 2  # steps, problems, completions
    for name in ("reward/mean", "rollout/mismatch_mean", "rollout/mismatch_max", "rollout/staleness"):
        assert metrics(two)[2][name] == pytest.approx(metrics(one)[2][name], rel=1e-3), name


@pytest.mark.full
def test_a_checkpoint_of_another_run_cannot_take_over_a_folder(
    tiny_model: str, short_config: str, tmp_path: Path
) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    for run in (mine, other):
        assert rlt(*small_fit(tiny_model, run, short_config, "--trainer.max_steps=2")).returncode == 0
    before = (mine / "metrics.csv").read_text()
    [checkpoint] = (other / "checkpoints").iterdir()  # a finished run keeps only its newest
    assert checkpoint.name == "step=000002.ckpt"
    result = rlt(*small_fit(tiny_model, mine, short_config, f"--ckpt_path={checkpoint}"))
    assert_one_clear_line(result, "must be empty or new")
    assert (mine / "metrics.csv").read_text() == before
    for part in ("weights/model.safetensors", "state.pt"):
        (checkpoint / part).write_bytes(b"")
        result = rlt(*small_fit(tiny_model, other, short_config, "--ckpt_path=last"))
        assert_one_clear_line(result, "cannot be read")


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
    result = rlt(*arguments, f"--output_dir={whole}")
    assert result.returncode == 0, result.stderr
    process = start(*arguments, f"--output_dir={killed}")
    wait_for((killed / "checkpoints" / "step=000003.ckpt").exists, process)
    process.kill()
    process.wait()
    result = rlt(*arguments, f"--output_dir={killed}", "--ckpt_path=last")
    assert result.returncode == 0, result.stderr
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
    result = rlt(*score)
    assert result.returncode == 0, result.stderr
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
def test_a_second_run_refuses_the_folder_until_told_to_overwrite(
    tiny_model: str, short_config: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = small_fit(tiny_model, run, short_config, "--trainer.max_steps=1")
    assert rlt(*arguments).returncode == 0
    first = (run / "metrics.csv").read_text()
    assert_one_clear_line(rlt(*arguments), "must be empty or new")
    assert (run / "metrics.csv").read_text() == first
    assert rlt(*arguments, "--overwrite=true", "--model.seed=5").returncode == 0
    (run / "thesis.txt").write_text("ten years of work")
    assert_one_clear_line(rlt(*arguments, "--overwrite=true"), "thesis.txt")
    assert (run / "thesis.txt").exists()


@pytest.mark.full
@pytest.mark.parametrize("verb", ["fit", *(full(v) for v in ("predict", "test"))])
def test_a_failed_push_is_corrected_in_the_written_config(verb: str, tiny_model: str, tmp_path: Path) -> None:
    config = {
        "fit": "tests/rlt.yaml",
        "predict": "configs/recipe_7b/generate.yaml",
        "test": "configs/recipe_7b/evaluate.yaml",
    }
    command = [verb, f"--config={ROOT / config[verb]}", "--trainer.accelerator=cpu", "--output_dir=run"]
    if verb == "test":
        command += [f"--model.pretrained={tiny_model}", "--data.sets={chains: null}", "--data.max_rows=2"]
    else:
        command += [f"--model.teacher={tiny_model}", f"--model.student={tiny_model}"]
        command += ["--data.source=chains", "--data.num_embedded_rows=2", "--data.tags=r1"]
        command += ["--model.dtype=float32"]
    command += ["--trainer.max_steps=1"] if verb == "fit" else []
    command += ["--rollouts.sampling.max_completion_length=8"]
    command += ["--rollouts.engine=rlt_lightning.engines.VLLMEngine"]
    command += ["--rollouts.engine.push=rlt_lightning.engines.IPCPush"]
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()

    def scores_of_other_weights(token_ids: list[int]) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)

    with FakeWorker(score=scores_of_other_weights) as other, worker_of(tiny_model) as own:
        result = rlt(*command, f"--rollouts.engine.urls=[{other.url}]", cwd=tmp_path)
        assert result.returncode == 2
        assert "must hold the trainer's weights" in result.stderr
        assert list((run / "weights").rglob("*.safetensors"))
        written = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(written.replace(other.url, own.url))
        result = rlt(verb, "--config=../run/config.yaml", "--output_dir=../run", cwd=elsewhere)
    assert result.returncode == 0, result.stderr


def test_an_interrupt_before_a_run_begins_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlt_lightning.cli.main.run", run)
    monkeypatch.setattr(sys, "argv", ["rlt", "fit", "--config=laptop/rlt"])
    monkeypatch.setattr(sys, "path", [*sys.path])  # it adds the current folder
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code == 130


def test_without_deepspeed_its_strategy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlt_lightning.strategies.zero.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'rlt-lightning\[deepspeed\]'"):
        DeepSpeed()


@pytest.mark.full
def test_validation_is_the_same_however_rows_are_shared(
    tiny_model: str, short_config: str, tmp_path: Path
) -> None:
    found = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        options = ["--data.val_rows=3", "--data.val_batch_size=4", f"--trainer.devices={number}"]
        options += ["--trainer.max_steps=1", "--trainer.val_check_interval=1", "--export.enabled=false"]
        result = rlt(*small_fit(tiny_model, folder, short_config, *options))
        assert result.returncode == 0, result.stderr
        found.append(metrics(folder)[1])
    names = [name for name in found[0] if "/val_" in name]
    assert len(names) == 7
    for name in names:
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-5, abs=1e-5), name  # nats, by rounding
