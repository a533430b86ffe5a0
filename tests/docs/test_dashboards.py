"""What runs send to W&B and TensorBoard, read back from their files, without an account."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import wandb_overview
from commands import ROOT, rlt, run_rlt
from fits import read_metrics, small_fit
from gpqa import gpqa_like
from rows_of import read
from wandb_run import runs_in

from rlt_lightning.metrics.answers import SET_FIGURES
from rlt_lightning.run.redaction import redact

OVERLAYS = [f"--config=configs/add/{name}.yaml" for name in ("wandb", "tensorboard")]


def fit(model: str, folder: Path, *options: str) -> None:
    """A tiny run, into both dashboards."""
    tiny = ["--rollouts.sampling.max_completion_length=6", "--model.group_size=4", "--export.enabled=false"]
    tiny += ["--alarms.truncated_above=1"]  # random weights close nothing
    result = rlt(*small_fit(model, folder, *OVERLAYS, *tiny, *options))
    assert "rlt: alarm" not in result.stderr
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def resumed(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed after iteration 3 and went on to 4 from its last checkpoint, of iteration 2."""
    folder = tmp_path_factory.mktemp("resumed") / "run"
    options = ["--checkpoint.every_n_train_steps=2", "--data.val_rows=1", "--trainer.val_check_interval=1"]
    options += ["--checkpoint.save_top_k=-1"]
    fit(tiny_model, folder, *options, "--trainer.max_steps=3")
    shutil.rmtree(folder / "checkpoints" / "step=000003.ckpt")
    fit(tiny_model, folder, *options, "--trainer.max_steps=4", "--resume=true")
    return folder


def test_wandb_gets_the_metrics_of_the_csv(resumed: Path) -> None:
    first, second = runs_in(resumed)
    assert (first.name, first.group) == ("run", resumed.parent.name)
    assert first.id == second.id
    assert sorted(first.scalars()) == [1, 2, 3]
    assert sorted(second.scalars()) == [3, 4]
    shown = first.scalars() | second.scalars()
    for step, row in read_metrics(resumed).items():
        assert shown[step] == pytest.approx(row)


def test_wandb_shows_some_completions_of_each_iteration(resumed: Path) -> None:
    recorded = read(resumed / "rollouts.jsonl")
    first, second = runs_in(resumed)
    assert {row["step"] for row in first.table()} == {3}  # of one iteration; the last table is read here
    [*shown] = second.table()
    assert [row["completion"] for row in shown] == [r["completion"] for r in recorded if r["step"] == 4][::2]
    for row in shown:
        place = 4, row["row"], row["completion"]
        [source] = [r for r in recorded if (r["step"], r["row"], r["completion"]) == place]
        assert row["explanation"] == source["explanation"]
        assert row["kl_reward"] == pytest.approx(source["kl_reward"])


def test_tensorboard_shows_completions_and_settings(resumed: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(resumed / "tensorboard"))
    events.Reload()
    first = events.Tensors("completions/text_summary")[0].tensor_proto.string_val[0].decode()
    recorded = read(resumed / "rollouts.jsonl")
    assert f"seed: {recorded[0]['seed']}\n" in first
    assert "_hparams_/session_start_info" in events.summary_metadata


def test_the_overview_charts_what_runs_log(resumed: Path) -> None:
    first, _ = runs_in(resumed)
    logged = set().union(*first.scalars().values())
    charted = [name for charts in wandb_overview.SECTIONS.values() for chart in charts for name in chart]
    # Of fine-tuning, of vLLM workers, and of GPUs.
    elsewhere = {"policy/val_loss", "perf/push_s"} | {name for name in charted if name.endswith("_gib")}
    assert set(charted) - elsewhere <= logged
    assert [row for row in first.history if wandb_overview.TABLE in row]
    page = (ROOT / "docs" / "metrics.md").read_text().partition("## Watch these first")[2]
    page = page.partition("\n## ")[0]
    watched = re.findall(r"^\| `([\w/]+)`", page, re.MULTILINE)
    assert len(watched) == 10
    assert [name for name in charted if name in watched] == watched


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_without_a_login_one_line_says_so(mode: str, tiny_model: str, tmp_path: Path) -> None:
    options = ["fit", "--config=tests/rlt.yaml", OVERLAYS[0], "--trainer.logger.log_model=all"]
    options += ["--model.student=none", f"--output_dir={tmp_path / 'run'}"]
    home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_MODE": mode}
    result = rlt(*options, **home)
    assert result.returncode == 2
    [line] = [line for line in result.stderr.splitlines() if line.startswith("rlt: error")]
    assert ("wandb login" in line) == (mode == "online")  # else the model that there is not
    assert "log_model uploads nothing" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("verb", ["fit", "predict", "test"])
def test_a_logger_that_cannot_start_ends_before_sampling(verb: str, tiny_model: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = {"fit": "tests/rlt.yaml", "predict": "configs/laptop/generate.yaml"}
    models = ["pretrained"] if verb == "test" else ["teacher", "student"]
    options = [f"--config={config.get(verb, 'configs/laptop/evaluate.yaml')}", OVERLAYS[1]]
    options += [f"--model.{name}={tiny_model}" for name in models]
    options += ["--data.sets={chains: null}", "--data.max_rows=2"] if verb == "test" else []
    folder = tmp_path / "run"
    result = rlt(
        verb, *options, f"--trainer.logger.save_dir={tmp_path / 'file'}/logs", f"--output_dir={folder}"
    )
    assert result.returncode not in (0, None)
    assert not [*folder.glob("*.jsonl"), *folder.glob("metrics.csv")]
    assert str(tmp_path / "file") in result.stderr


def test_a_run_leaves_nothing_in_the_home_folder_and_tells_nothing_of_the_machine(resumed: Path) -> None:
    files = {path.name for path in (resumed / "wandb").rglob("*") if path.is_file()}
    assert "wandb-metadata.json" not in files  # command line, host, user, git remote
    assert "output.log" not in files
    assert any(name.endswith(".wandb") for name in files)


def test_an_evaluation_logs_figures_and_no_text_of_private_questions(tiny_model: str, tmp_path: Path) -> None:
    path = gpqa_like(tmp_path / "rows.jsonl")
    folder = tmp_path / "run"
    options = ["--config=configs/laptop/smollm2_evaluate.yaml", *OVERLAYS, f"--model.pretrained={tiny_model}"]
    options += [f"--data.sets={{gpqa_diamond: {path}}}", "--rollouts.sampling.max_completion_length=4"]
    run_rlt("test", *options, "--trainer.accelerator=cpu", f"--output_dir={folder}")
    [run] = runs_in(folder)
    [figures] = run.scalars().values()
    assert set(figures) == {f"eval/gpqa_diamond/{name}" for name in SET_FIGURES}
    questions = [row["Question"].encode() for row in read(path)]
    watched = [p for name in ("wandb", "tensorboard") for p in (folder / name).rglob("*") if p.is_file()]
    assert watched
    assert not [p for p in watched for question in questions if question in p.read_bytes()]


# Secrets


def test_secrets_do_not_leave_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "key-of-the-environment")
    monkeypatch.setenv("PGPASSWORD", "key-of-the-database")
    monkeypatch.setenv("DJANGO_SECRET_KEY", "key-of-the-site")
    secrets = ["pa55-word", "key-of-the-database", "key-of-the-site", "18273645", "key-of-the-environment"]
    secrets += ["launch-secret", "hf_abcdefghijklmnopqrst", "s3cr3t-flag"]
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
