"""What runs send to W&B and TensorBoard, read back from their files, without an account."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from commands import rlt
from gpqa import gpqa_like
from metric_names import names_of
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from wandb_run import runs_in

from rlt_lightning.callbacks import Alarms
from rlt_lightning.modules.rollout_rows import spread_evenly
from rlt_lightning.run.redaction import redact

OVERLAYS = [f"--config=configs/add/{name}.yaml" for name in ("wandb", "tensorboard")]
COMPLETIONS = 3  # shown of each iteration's 8


def fit(model: str, folder: Path, *options: str) -> None:
    """A tiny run, into both dashboards."""
    tiny = [f"--model.{name}={model}" for name in ("teacher", "student")]
    tiny += [
        "--data.num_embedded_rows=8",
        "--rollouts.sampling.max_completion_length=6",
        "--alarms.truncated_above=1",  # random weights close nothing
        "--export.enabled=false",
    ]
    command = ["fit", "--config=tests/rlt.yaml", *OVERLAYS, *tiny, f"--output_dir={folder}", *options]
    result = rlt(*command)
    assert "rlt: alarm" not in result.stderr
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def resumed(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed after iteration 3 and went on to 4 from its last checkpoint, of iteration 2."""
    folder = tmp_path_factory.mktemp("resumed") / "run"
    options = [f"--completions.num_completions={COMPLETIONS}", "--checkpoint.every_n_train_steps=2"]
    options += ["--data.val_rows=1", "--trainer.val_check_interval=1"]
    options += ["--checkpoint.save_top_k=-1"]
    fit(tiny_model, folder, *options, "--trainer.max_steps=3")
    shutil.rmtree(folder / "checkpoints" / "step=000003.ckpt")
    fit(tiny_model, folder, *options, "--trainer.max_steps=4", "--resume=true")
    return folder


def csv_rows(folder: Path) -> dict[int, dict[str, float]]:
    with open(folder / "metrics.csv", newline="") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return {int(row.pop("step")): row for row in rows}


def test_wandb_gets_the_metrics_of_the_csv(resumed: Path) -> None:
    first, second = runs_in(resumed)
    assert sorted(first.scalars()) == [1, 2, 3]
    assert sorted(second.scalars()) == [3, 4]
    shown = first.scalars() | second.scalars()
    for step, row in csv_rows(resumed).items():
        assert shown[step] == pytest.approx(row)


def test_the_table_has_a_row_per_sampled_completion(resumed: Path) -> None:
    recorded: dict[int, list[dict[str, Any]]] = {}
    for line in (resumed / "rollouts.jsonl").open():
        row = json.loads(line)
        recorded.setdefault(row["step"], []).append(row)
    assert [len(rows) for rows in recorded.values()] == [8] * 4
    expected = [row for rows in recorded.values() for row in spread_evenly(rows, COMPLETIONS)]

    first, second = runs_in(resumed)
    assert [row["iteration"] for row in first.table()] == sorted([1, 2, 3] * COMPLETIONS)
    table = first.table()[: 2 * COMPLETIONS] + second.table()
    assert [(r["iteration"], r["problem"], r["completion"]) for r in table] == [
        (r["step"], r["row"], r["completion"]) for r in expected
    ]
    same = (
        "question",
        "solution",
        "explanation",
        "finish_reason",
        "num_tokens",
        "reward",
        "kl_mean",
        "kl_max",
    )
    same += ("solution_log_prob_mean", "solution_log_prob_min", "format_reward", "kl_reward")
    for row, source in zip(table, expected, strict=True):
        assert {name: row[name] for name in same} == pytest.approx({name: source[name] for name in same})
        assert row["closed"] is (source["finish_reason"] == "stop")
        assert min(row["prompt_tokens"], row["solution_tokens"]) > 0


def test_a_run_leaves_nothing_in_the_home_folder_and_tells_nothing_of_the_machine(resumed: Path) -> None:
    files = {path.name for path in (resumed / "wandb").rglob("*") if path.is_file()}
    assert "wandb-metadata.json" not in files  # command line, host, user, git remote
    assert "output.log" not in files
    assert any((resumed / "wandb" / "data" / "artifacts" / "staging").iterdir())


def board_of(folder: Path) -> dict[str, dict[int, Any]]:
    """What TensorBoard shows: values by tag and step."""
    board = EventAccumulator(str(folder / "tensorboard"), {"tensors": 0}).Reload()
    shown: dict[str, dict[int, Any]] = {}
    for tag in board.Tags()["tensors"]:
        events = board.Tensors(tag)
        shown[tag] = {event.step: make_ndarray(event.tensor_proto) for event in events}
        assert len(shown[tag]) == len(events), f"{tag} has an iteration twice"
    return shown


def test_tensorboard_shows_every_iteration_once_through_a_resume(resumed: Path) -> None:
    board, rows = board_of(resumed), csv_rows(resumed)
    for name in {name for row in rows.values() for name in row}:
        values = {step: float(value) for step, value in board[name].items()}
        assert values == pytest.approx(
            {step: row[name] for step, row in rows.items() if name in row}, rel=1e-5
        )


@pytest.mark.full
def test_fine_tuning_logs_to_both(tiny_model: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["--data.source=arithmetic", "--data.num_embedded_rows=4", "--data.prompts_per_step=2"]
    options += ["--data.max_length=2048", "--trainer.accelerator=cpu", "--trainer.precision=32-true"]
    options += [f"--model.pretrained={tiny_model}", "--trainer.max_steps=1", "--export.enabled=false"]
    result = rlt(
        "fit",
        "--config=configs/laptop/smollm2_sft.yaml",
        *OVERLAYS,
        *options,
        f"--output_dir={folder}",
        WANDB_MODE="offline",
    )
    assert result.returncode == 0, result.stderr
    [run] = runs_in(folder)
    assert {"policy/loss", "data/epoch"} <= run.scalars()[1].keys()
    assert "policy/loss" in board_of(folder)


def test_an_evaluation_logs_figures_and_no_text_of_private_questions(tiny_model: str, tmp_path: Path) -> None:
    path = gpqa_like(tmp_path / "rows.jsonl")
    folder = tmp_path / "run"
    options = ["--config=configs/laptop/smollm2_evaluate.yaml", *OVERLAYS, f"--model.pretrained={tiny_model}"]
    options += [f"--data.sets={{gpqa_diamond: {path}}}", "--rollouts.sampling.max_completion_length=4"]
    result = rlt("test", *options, "--trainer.accelerator=cpu", f"--output_dir={folder}")
    assert result.returncode == 0, result.stderr
    [run] = runs_in(folder)
    [figures] = run.scalars().values()
    assert {name.replace("gpqa_diamond", "SET") for name in figures if "overall" not in name} == names_of(
        "eval/"
    )
    questions = [json.loads(line)["Question"].encode() for line in path.open()]
    watched = [p for name in ("wandb", "tensorboard") for p in (folder / name).rglob("*") if p.is_file()]
    assert watched
    assert not [p for p in watched for question in questions if question in p.read_bytes()]


# Secrets


def test_secrets_do_not_leave_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "key-of-the-environment")
    monkeypatch.setenv("PGPASSWORD", "key-of-the-database")
    monkeypatch.setenv("DJANGO_SECRET_KEY", "key-of-the-site")
    secrets = [
        "pa55-word",
        "key-of-the-database",
        "key-of-the-site",
        "18273645",
        "key-of-the-environment",
        "launch-secret",
        "hf_abcdefghijklmnopqrst",
        "s3cr3t-flag",
    ]
    settings = {
        "urls": ["http://user:pa55-word@worker:8000/v1", "https://host/rows?split=a&token=pa55-word"],
        "engine": {
            "api_key": "pa55-word",
            "password": "pa55-word",
            "passwd": 18273645,
            "accessToken": "pa55-word",
            "clientSecret": "pa55-word",
            "headers": {"Authorization": "pa55-word", "Ocp-Apim-Subscription-Key": "pa55-word"},
        },
        "launch": {"environment": {"ANYTHING": "launch-secret"}, "arguments": ["--api-key", "s3cr3t-flag"]},
        "command": "VLLM_API_KEY=pa55-word serve --auth-token=s3cr3t-flag; key-of-the-environment",
        "arguments": ["--password pa55-word", "Authorization: Token pa55-word", "X-Api-Key: pa55-word"],
        "env": {"ANYTHING": "launch-secret"},
        "backend": "postgres://key-of-the-database, key-of-the-site",
        "header": "Bearer pa55-word",
        "source": "hf_abcdefghijklmnopqrst",
    }
    kept = {
        "api_key_env": "VLLM_API_KEY",
        "micro_batch_tokens": 512,
        "tokenizer": "smollm2-135m",
        "use_auth_token": True,
        "recorder": {"tokens": "extremes"},
        "max_token": 12345678,
        "source": "https://host/rows?split=a",
    }
    kept["nothing"] = [[], {}, None]
    assert redact(kept) == kept
    hidden = redact(settings)
    assert hidden["urls"] == ["http://***@worker:8000/v1", "https://host/rows?split=a&token=***"]
    assert hidden["launch"]["arguments"] == ["--api-key", "***"]
    assert not [secret for secret in secrets if secret in json.dumps(hidden)]


# Alarms


def titles(alarms: Alarms, *iterations: dict[str, float]) -> list[list[str]]:
    return [[title for title, _ in alarms.find_alarms(metrics)] for metrics in iterations]


@pytest.mark.parametrize(
    ("name", "good", "bad", "title"),
    [
        ("reward/group_std", 0.4, 1e-5, "Rewards are all alike"),
        ("policy/entropy", 0.8, 0.01, "Entropy has collapsed"),
        ("rollout/staleness", 1.0, 2.0, "Rollouts are stale"),
        ("student/kl_mean", -0.3, -0.9, "The KL is negative"),
    ],
)
def test_an_alarm_needs_bad_iterations_in_a_row(name: str, good: float, bad: float, title: str) -> None:
    values = [good, good, good, bad, bad, good, bad, bad, bad, bad]
    found = titles(Alarms(patience=3), *({name: value} for value in values))
    assert found == [[]] * 8 + [[title]] * 2


def test_completions_that_are_cut_ring_at_once_with_what_they_earn(tmp_path: Path) -> None:
    [(title, text)] = Alarms().find_alarms({"rollout/truncated_frac": 0.25}, ", and earn -1")
    assert title == "Completions are cut"
    assert text.startswith(
        "25 % of the completions reach rollouts.sampling.max_completion_length, and earn -1. Raise it"
    )
    assert not [*Alarms().find_alarms({"rollout/truncated_frac": 0.1})]
    assert not [*Alarms(truncated_above=1.0).find_alarms({"rollout/truncated_frac": 1.0})]
    words = ("--trainer.max_steps=1", "--data.num_embedded_rows=8", "--data.prompts_per_step=8")
    limit = "--rollouts.sampling.max_completion_length=24"  # five steps have 32 tokens, filler has fewer
    result = rlt("fit", "--config=laptop/rlt", *words, limit, f"--output_dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    alarm = re.search(
        r"alarm: Completions are cut. Iteration 1: (\d+) % of the completions reach "
        r"rollouts.sampling.max_completion_length, and earn (\S+) where the others earn (\S+)\.",
        result.stderr,
    )
    assert alarm is not None, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").open()]
    cut = [row["reward"] for row in rows if row["finish_reason"] == "length"]
    others = [row["reward"] for row in rows if row["finish_reason"] != "length"]
    assert alarm[1] == f"{100 * len(cut) / len(rows):.0f}"
    assert (alarm[2], alarm[3]) == (f"{fmean(cut):.2f}", f"{fmean(others):.2f}")
    assert f"rollout/truncated_frac {len(cut) / len(rows):.3g}" in result.stderr


def test_what_is_not_finite_rings_at_once_and_an_alarm_is_silent_for_a_while(capsys: Any) -> None:
    class Trainer:
        is_global_zero = True
        loggers = ()
        global_step = 0
        callback_metrics = {"policy/loss": torch.tensor(torch.nan), "reward/mean": torch.tensor(1.0)}  # noqa: RUF012

    alarms, trainer = Alarms(quiet_steps=10), Trainer()
    for trainer.global_step in range(1, 22):
        if trainer.global_step == 5:  # a resumed run is as silent
            resumed = Alarms(quiet_steps=10)
            resumed.load_state_dict(alarms.state_dict())
            alarms = resumed
        alarms.on_train_batch_end(trainer, None, None, None, 0)  # type: ignore[arg-type]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[2].strip() for line in lines] == [
        "Not finite. Iteration 1",
        *(f"Not finite. Iteration {step}" for step in (11, 21)),
    ]
    assert "policy/loss must be finite" in lines[0]
