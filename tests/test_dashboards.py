"""What W&B and TensorBoard are given, read back from the files of runs without an account."""

from __future__ import annotations

import csv
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
import yaml
from commands import ROOT, rlt
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from test_docs_metrics import names_of
from test_evaluation import gpqa_like

from rlt_lightning import __version__
from rlt_lightning.callbacks import Alarms
from rlt_lightning.datamodules.evaluation_sets import SETS
from rlt_lightning.loggers.redaction import without_secrets
from rlt_lightning.loggers.wandb_files import read_run
from rlt_lightning.loggers.wandb_logger import WandbLogger
from rlt_lightning.loggers.workspace import dashboard, workspace
from rlt_lightning.records.catalogue import metrics
from rlt_lightning.records.rows import evenly_spread
from rlt_lightning.types import InputError

OVERLAYS = [f"--config=configs/overlays/{name}.yaml" for name in ("wandb", "tensorboard")]
COMPLETIONS = 3  # shown of each iteration's 8
OTHER_MODULES = {"policy/val_loss", "perf/evaluate_s"} | {
    f"reward/{part}{name}" for part in ("", "val_") for name in ("correct", "formatted", "timed_out")
}  # panels of SFT, of traditional RL and of EvaluateEvery
OTHER_MODULES |= {metric.name for metric in metrics() if metric.table == "dynamic_sampling"}


def nested(items: Any) -> dict[str, Any]:
    """Values of a history or configuration record by name."""
    found: dict[str, Any] = {}
    for item in items:
        *path, last = list(item.nested_key) or [item.key]
        place = found
        for name in path:
            place = place.setdefault(name, {})
        place[last] = json.loads(item.value_json)
    return found


class Run:
    """All that one process gave to W&B."""

    def __init__(self, folder: Path) -> None:
        [path] = folder.glob("*.wandb")
        records = list(read_run(path))
        runs = [record.run for record in records if record.HasField("run")]
        self.id, self.name = runs[0].run_id, runs[0].display_name
        self.config: dict[str, Any] = {}
        for record in records:
            if record.HasField("config"):
                self.config |= nested(record.config.update)
        self.history = [nested(r.history.item) for r in records if r.HasField("history")]
        self.alerts = [record.alert for record in records if record.HasField("alert")]
        self.axes = {r.metric.glob_name: r.metric.step_metric for r in records if r.HasField("metric")}
        self.folder = folder

    def scalars(self) -> dict[int, dict[str, float]]:
        """By iteration."""
        found: dict[int, dict[str, float]] = {}
        for row in self.history:
            numbers = {n: v for n, v in row.items() if not isinstance(v, dict) and n[0] != "_"}
            found.setdefault(numbers.pop("iteration"), {}).update(numbers)
        return found

    def table(self) -> list[dict[str, Any]]:
        """The last that was sent, which replaces those before it."""
        entry = [row["completions"] for row in self.history if "completions" in row][-1]
        table = json.loads((self.folder / "files" / entry["path"]).read_text())
        assert entry["nrows"] == len(table["data"])
        return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def runs_in(folder: Path) -> list[Run]:
    return [Run(path) for path in sorted((folder / "wandb").glob("offline-run-*"))]


def fit(model: str, folder: Path, *options: str) -> None:
    """A tiny run, into both dashboards."""
    tiny = [f"--model.{name}={model}" for name in ("teacher", "student")]
    tiny += [
        "--data.num_embedded_rows=8",
        "--rollouts.sampling.max_completion_length=6",
        "--export.enabled=false",
    ]
    result = rlt("fit", "--config=tests/rlt.yaml", *OVERLAYS, *tiny, f"--output_dir={folder}", *options)
    assert "rlt: alarm" not in result.stderr
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def resumed(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended after iteration 3 and went on to 4 from its last checkpoint, of iteration 2."""
    folder = tmp_path_factory.mktemp("resumed") / "run"
    options = [f"--completions.num_completions={COMPLETIONS}", "--checkpoint.every_n_train_steps=2"]
    options += ["--data.val_rows=1", "--trainer.val_check_interval=1"]
    fit(tiny_model, folder, *options, "--trainer.max_steps=3")
    fit(tiny_model, folder, *options, "--trainer.max_steps=4", "--resume=true")
    return folder


def csv_rows(folder: Path) -> dict[int, dict[str, float]]:
    with open(folder / "metrics.csv", newline="") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return {int(row.pop("step")): row for row in rows}


def test_a_resumed_run_goes_on_in_the_same_run_of_wandb_with_the_metrics_of_the_csv(resumed: Path) -> None:
    first, second = runs_in(resumed)
    assert first.id == second.id == (resumed / "wandb" / "run_id").read_text().strip()
    assert first.name == "run"
    assert sorted(first.scalars()) == [1, 2, 3]
    assert sorted(second.scalars()) == [3, 4]
    shown = first.scalars() | second.scalars()
    for step, row in csv_rows(resumed).items():
        assert shown[step] == pytest.approx(row)
    for run in (first, second):
        assert [row["_step"] for row in run.history] == list(range(len(run.history)))
        prefixes = {name for name in run.axes if name}
        assert prefixes == {
            f"{p}/*" for p in ("reward", "policy", "student", "rollout", "perf", "data", "eval")
        }
        assert {run.axes[name] for name in prefixes} == {"iteration"}


def test_iterations_that_wandb_did_not_come_to_write_are_logged_on_resume(tmp_path: Path) -> None:
    rows = {step: {"perf/tokens_per_s": repr(step / 2), "reward/mean": "0.5"} for step in range(1, 60)}
    logger = WandbLogger(save_dir=str(tmp_path))
    logger.catch_up(rows)
    logger.finalize("success")
    wandb.teardown()  # as the end of a process does: then all is written
    [run] = runs_in(tmp_path)
    [path] = run.folder.glob("*.wandb")
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])  # a kill loses the last block
    held = Run(run.folder).scalars().keys()
    assert 10 < len(held) < 59

    again = WandbLogger(save_dir=str(tmp_path))
    again.catch_up(rows)
    again.finalize("success")
    wandb.teardown()
    _, second = runs_in(tmp_path)
    assert second.scalars() == {
        step: {name: float(value) for name, value in row.items()}
        for step, row in rows.items()
        if step not in held
    }


def test_a_run_holds_the_metrics_of_all_panels_but_those_of_other_modules(resumed: Path) -> None:
    logged = {name for run in runs_in(resumed) for row in run.scalars().values() for name in row}
    of_teacher = {name for name in panel_metrics() if not name.startswith(("data/", "eval/"))} - OTHER_MODULES
    assert logged == of_teacher


def test_the_table_has_one_row_per_sampled_completion_through_a_resume(resumed: Path) -> None:
    recorded: dict[int, list[dict[str, Any]]] = {}
    for line in (resumed / "rollouts.jsonl").open():
        row = json.loads(line)
        recorded.setdefault(row["step"], []).append(row)
    assert [len(rows) for rows in recorded.values()] == [8] * 4
    expected = [row for rows in recorded.values() for row in evenly_spread(rows, COMPLETIONS)]

    table = runs_in(resumed)[-1].table()
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
    cut_off = runs_in(resumed)[0].table()
    assert [row["iteration"] for row in cut_off] == [1] * COMPLETIONS + [2] * COMPLETIONS + [3] * COMPLETIONS


def test_the_configuration_and_the_code_version_are_in_the_run(resumed: Path) -> None:
    config = runs_in(resumed)[0].config
    written = yaml.safe_load((resumed / "config.yaml").read_text())
    assert config["code"]["version"] == __version__
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    assert config["code"].get("commit") == (head.stdout.strip() or None)  # None: no checkout
    for name in ("model", "data", "rollouts", "completions", "alarms"):
        assert config[name] == written[name], name


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
    for name in ("reward", "kl_mean", "solution_log_prob_mean", "format_reward", "num_tokens"):
        histograms = board[f"completions/{name}"]
        assert {step: buckets[:, 2].sum() for step, buckets in histograms.items()} == dict.fromkeys(rows, 8)
    for number in range(COMPLETIONS):
        assert board[f"completions/{number}/text_summary"].keys() == rows.keys()
    first = json.loads(next((resumed / "rollouts.jsonl").open()))
    assert first["question"] in str(board["completions/0/text_summary"][1])


@pytest.mark.full
def test_a_run_in_a_replaced_folder_is_a_new_run_and_a_failure_sends_an_alert(
    tiny_model: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    (folder / "wandb").mkdir(parents=True)
    (folder / "wandb" / "run_id").write_text("before\n")
    options = ["--overwrite=true", "--trainer.max_steps=4", "--model.optimizer.lr=1e30"]
    with pytest.raises(AssertionError, match="must be finite"):
        fit(tiny_model, folder, *options)
    [run] = runs_in(folder)
    assert run.id != "before"
    [alert] = [alert for alert in run.alerts if alert.title == "The run has failed"]
    assert alert.level == "ERROR"
    assert "NonFiniteError" in alert.text
    assert run.table()
    assert "NonFiniteError" in str(board_of(folder)["alarms/text_summary"])


@pytest.mark.full
def test_fine_tuning_logs_to_both(tiny_model: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["--data.source=arithmetic", "--data.num_embedded_rows=4", "--data.prompts_per_step=2"]
    options += ["--data.max_length=2048", "--trainer.accelerator=cpu", "--trainer.precision=32-true"]
    options += [f"--model.pretrained={tiny_model}", "--trainer.max_steps=1", "--export.enabled=false"]
    result = rlt(
        "fit", "--config=configs/smollm2_student_sft.yaml", *OVERLAYS, *options, f"--output_dir={folder}"
    )
    assert result.returncode == 0, result.stderr
    [run] = runs_in(folder)
    assert {"policy/loss", "data/epoch"} <= run.scalars()[1].keys()
    assert "policy/loss" in board_of(folder)


def test_an_evaluation_logs_figures_and_no_text_of_private_questions(tiny_model: str, tmp_path: Path) -> None:
    path = gpqa_like(tmp_path / "rows.jsonl")
    folder = tmp_path / "run"
    options = ["--config=configs/smollm2_evaluate.yaml", *OVERLAYS, f"--model.pretrained={tiny_model}"]
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


# Accounts


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Without an account, and without a say of where to log."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    wandb.teardown()  # it reads the environment once
    yield monkeypatch
    wandb.teardown()


def test_a_key_in_the_environment_or_in_netrc_is_an_account(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert WandbLogger()._mode()[0] == "offline"
    host = wandb.setup().settings.base_url.removeprefix("https://")
    (tmp_path / "netrc").write_text(f"machine {host}\n  login user\n  password {'a' * 40}\n")
    assert WandbLogger()._mode()[0] == "online"
    (tmp_path / "netrc").unlink()
    wandb.teardown()
    environment.setenv("WANDB_API_KEY", "a" * 40)
    assert WandbLogger()._mode()[0] == "online"
    assert WandbLogger(offline=True)._mode() == ("offline", "the logger's offline is true")
    environment.setenv("WANDB_API_KEY", "short")
    with pytest.raises(InputError, match="API key must have"):
        WandbLogger()._mode()
    environment.setenv("WANDB_API_KEY", "a" * 40)
    for mode, chosen in (("offline", "offline"), ("disabled", "disabled"), ("online", "online")):
        environment.setenv("WANDB_MODE", mode)
        assert WandbLogger()._mode()[0] == chosen


def test_what_needs_an_account_says_so(environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"there is none\. Call `wandb login`"):
        dashboard("explanations")
    with pytest.raises(InputError, match="--run_dir must be the folder of a run, but nowhere is none"):
        dashboard("explanations", run_dir="nowhere")
    for mode in ("on", ""):
        environment.setenv("WANDB_MODE", mode)
        with pytest.raises(InputError, match=f"WANDB_MODE must be one of online, .* but is '{mode}'"):
            WandbLogger()._mode()
    environment.setenv("WANDB_MODE", "online")
    with pytest.raises(InputError, match="WANDB_MODE is online, which needs an account"):
        WandbLogger()._mode()


def test_the_dashboard_command_tells_in_one_line_that_there_is_no_account() -> None:
    result = rlt("dashboard", "--project=explanations")
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "an account of Weights & Biases, but WANDB_MODE is offline" in result.stderr


# The saved dashboard


def panel_metrics() -> list[str]:
    """Every metric of every panel of the definition that would be saved."""
    spec = (
        workspace("project", "entity", "name")._to_model().spec.model_dump(by_alias=True, exclude_none=True)
    )
    panels = [p for section in spec["section"]["panelBankConfig"]["sections"] for p in section["panels"]]
    return [name for panel in panels for name in panel["config"].get("metrics", [])]


def test_every_metric_of_the_page_is_in_one_panel_and_no_other() -> None:
    sections = ("reward/", "student/", "policy/", "rollout/", "perf/", "data/")
    figures = {name.replace("SET", name_of_set) for name in names_of("eval/") for name_of_set in SETS}
    overall = {f"eval/overall/{name}" for name in ("pass_at_1", "standard_error", "pass_at_k", "maj_at_k")}
    assert sorted(panel_metrics()) == sorted(names_of(*sections) | figures | overall)


def test_panels_have_the_iteration_as_their_axis_and_phases_are_stacked() -> None:
    made = workspace("project", "entity", "name")
    lines = [panel for section in made.sections for panel in section.panels if hasattr(panel, "plot_type")]
    assert {panel.x for panel in lines} == {"iteration"}
    [stacked] = [panel for panel in lines if panel.plot_type == "stacked-area"]
    assert set(stacked.y) == {f"perf/{phase}_s" for phase in ("generate", "push", "score", "train")}
    assert [section.name for section in made.sections][-1] == "completions"


# Secrets


def test_secrets_do_not_leave_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    assert without_secrets(kept) == kept
    hidden = without_secrets(settings)
    assert hidden["urls"] == ["http://***@worker:8000/v1", "https://host/rows?split=a&token=***"]
    assert hidden["launch"]["arguments"] == ["--api-key", "***"]
    assert not [secret for secret in secrets if secret in json.dumps(hidden)]

    logger = WandbLogger(save_dir=str(tmp_path))
    logger.log_hyperparams(settings)
    logger.finalize("success")
    wandb.teardown()  # as the end of a process does: then all is written
    [run] = runs_in(tmp_path)
    assert run.config["engine"]["api_key"] == "***"
    written = [path.read_bytes() for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    assert not [secret for secret in secrets for text in written if secret.encode() in text]


# Alarms


def titles(alarms: Alarms, *iterations: dict[str, float]) -> list[list[str]]:
    return [[title for title, _ in alarms.found(metrics)] for metrics in iterations]


@pytest.mark.parametrize(
    ("name", "good", "bad", "title"),
    [
        ("reward/group_std", 0.4, 1e-5, "Rewards are all alike"),
        ("policy/entropy", 0.8, 0.01, "Entropy has collapsed"),
        ("rollout/truncated_frac", 0.3, 0.9, "Completions are cut off"),
        ("rollout/staleness", 1.0, 2.0, "Rollouts are stale"),
        ("student/kl_mean", -0.3, -0.9, "The KL is negative"),
    ],
)
def test_an_alarm_needs_bad_iterations_in_a_row(name: str, good: float, bad: float, title: str) -> None:
    values = [good, good, good, bad, bad, good, bad, bad, bad, bad]
    found = titles(Alarms(patience=3), *({name: value} for value in values))
    assert found == [[]] * 8 + [[title]] * 2


def test_completions_that_were_always_cut_off_ring_no_alarm() -> None:
    values = (
        0.875,
        0.875,
        0.75,
        0.875,
        0.375,
        0.875,
        0.875,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
    )  # quickstart, and worse
    assert not any(titles(Alarms(), *({"rollout/truncated_frac": value} for value in values)))


def iterations(lengths: list[float], rewards: list[float]) -> list[dict[str, float]]:
    return [
        {"rollout/length_mean": length, "reward/mean": reward}
        for length, reward in zip(lengths, rewards, strict=True)
    ]


def test_completions_that_shrink_as_the_reward_rises_ring() -> None:
    # The highest mean of two is 60 tokens, at a mean reward of -4; a third of that is 19.8.
    lengths = [50.0, 60.0, 60.0, 30.0, 19.0, 19.0, 21.0, 15.0, 10.0]
    rising = [-4.0, -4.0, -4.0, -3.0, -2.0, -2.0, -2.0, -1.0, -1.0]
    found = titles(Alarms(patience=2), *iterations(lengths, rising))
    shrink = ["Completions shrink as the reward rises"]
    assert found == [[], [], [], [], [], shrink, [], [], shrink]
    falling = [-reward - 8 for reward in rising]  # a collapse that the reward does not pay for
    assert not any(titles(Alarms(patience=2), *iterations(lengths, falling)))


def test_alarms_remember_over_a_resume_what_was_usual() -> None:
    before, after = Alarms(patience=2), Alarms(patience=2)
    titles(before, *iterations([60.0, 60.0], [-4.0, -4.0]))
    titles(before, *({"rollout/truncated_frac": 0.1} for _ in range(2)))
    after.load_state_dict(before.state_dict())
    found = titles(after, *iterations([15.0, 15.0], [-2.0, -2.0]))
    assert found == [[], ["Completions shrink as the reward rises"]]
    found = titles(after, *({"rollout/truncated_frac": 0.9} for _ in range(2)))
    assert "Completions are cut off" in found[1]


def test_what_is_not_finite_rings_at_once_and_an_alarm_is_silent_for_a_while(capsys: Any) -> None:
    class Trainer:
        is_global_zero = True
        loggers = ()
        global_step = 0
        callback_metrics = {"policy/loss": torch.tensor(torch.nan), "reward/mean": torch.tensor(1.0)}  # noqa: RUF012

    alarms, trainer = Alarms(quiet_steps=10), Trainer()
    for trainer.global_step in range(1, 22):
        alarms.on_train_batch_end(trainer, None, None, None, 0)  # type: ignore[arg-type]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[2].strip() for line in lines] == [
        "Not finite. Iteration 1",
        *(f"Not finite. Iteration {step}" for step in (11, 21)),
    ]
    assert "policy/loss must be finite" in lines[0]
