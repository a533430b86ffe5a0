"""What W&B and TensorBoard are given, read back from the files of runs without an account."""

from __future__ import annotations

import csv
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import wandb
import yaml
from cases import full
from commands import ROOT, python, rlt
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from test_docs_metrics import names_of
from test_evaluation import gpqa_like
from wandb_run import install_oldest, oldest, runs_in

from rlt_lightning import __version__
from rlt_lightning.callbacks import Alarms
from rlt_lightning.datamodules.evaluation_sets import SETS
from rlt_lightning.run.metrics import list_metrics
from rlt_lightning.run.redaction import redact
from rlt_lightning.run.rollout_rows import spread_evenly
from rlt_lightning.run.wandb_logger import WandbLogger, build_workspace, dashboard
from rlt_lightning.types import InputError

OVERLAYS = [f"--config=configs/overlays/{name}.yaml" for name in ("wandb", "tensorboard")]
COMPLETIONS = 3  # shown of each iteration's 8
OTHER_MODULES = {"policy/val_loss", "perf/evaluate_s"} | {
    f"reward/{part}{name}" for part in ("", "val_") for name in ("correct", "formatted", "timed_out")
}  # panels of SFT, of traditional RL and of EvaluateEvery
OTHER_MODULES |= {metric.name for metric in list_metrics() if metric.table == "dynamic_sampling"}
OTHER_MODULES |= {
    name for m in list_metrics() if m.prefix == "distill" for name in (m.name, m.name.replace("/", "/val_"))
}
OTHER_MODULES |= {"reward/baseline", "reward/val_baseline"}  # of reward.baseline: empty
OTHER_MODULES |= {"rollout/masked_frac"}  # of importance weights that mask
OTHER_MODULES |= {"reward/efficiency", "reward/val_efficiency", "policy/answer_loss"}  # of likelihood rewards
OTHER_MODULES |= {"rollout/half_character_frac"}  # of a student with another tokenizer


@pytest.fixture(scope="module", params=["installed", full("oldest")])
def wandb_path(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of a process with the installed wandb, or with the oldest that the package allows."""
    return {"PYTHONPATH": install_oldest()} if request.param == "oldest" else {}


def fit(model: str, folder: Path, *options: str, **environment: str) -> None:
    """A tiny run, into both dashboards."""
    tiny = [f"--model.{name}={model}" for name in ("teacher", "student")]
    tiny += [
        "--data.num_embedded_rows=8",
        "--rollouts.sampling.max_completion_length=6",
        "--export.enabled=false",
    ]
    command = ["fit", "--config=tests/rlt.yaml", *OVERLAYS, *tiny, f"--output_dir={folder}", *options]
    result = rlt(*command, fresh=bool(environment), **environment)
    assert "rlt: alarm" not in result.stderr
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def resumed(tiny_model: str, wandb_path: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended after iteration 3 and went on to 4 from its last checkpoint, of iteration 2."""
    folder = tmp_path_factory.mktemp("resumed") / "run"
    options = [f"--completions.num_completions={COMPLETIONS}", "--checkpoint.every_n_train_steps=2"]
    options += ["--data.val_rows=1", "--trainer.val_check_interval=1"]
    fit(tiny_model, folder, *options, "--trainer.max_steps=3", **wandb_path)
    fit(tiny_model, folder, *options, "--trainer.max_steps=4", "--resume=true", **wandb_path)
    return folder


def csv_rows(folder: Path) -> dict[int, dict[str, float]]:
    with open(folder / "metrics.csv", newline="") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return {int(row.pop("step")): row for row in rows}


@pytest.mark.full
def test_a_resumed_run_goes_on_in_the_same_run_of_wandb_with_the_metrics_of_the_csv(
    resumed: Path, wandb_path: dict[str, str]
) -> None:
    first, second = runs_in(resumed)
    assert {first.version, second.version} == {oldest()["wandb"] if wandb_path else wandb.__version__}
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
            f"{p}/*" for p in ("reward", "policy", "distill", "student", "rollout", "perf", "data", "eval")
        }
        assert {run.axes[name] for name in prefixes} == {"iteration"}


@pytest.mark.full
def test_iterations_that_a_killed_run_may_not_have_written_are_logged_again(
    wandb_path: dict[str, str], tmp_path: Path
) -> None:
    def process(code: str) -> subprocess.CompletedProcess[str]:
        return python(code, tmp_path, fresh=bool(wandb_path), **wandb_path)

    rows = {step: {"perf/tokens_per_s": repr(step / 2), "reward/mean": "0.5"} for step in range(1, 60)}
    values = {step: {name: float(value) for name, value in row.items()} for step, row in rows.items()}
    begin = "from rlt_lightning.run.wandb_logger import WandbLogger; logger = WandbLogger()"
    log = f"rows = {rows}; logger.catch_up(rows)"
    kill = "import os; os.killpg(0, 9)"  # this process and wandb's
    killed = process(f"{begin}; {log}; {kill}")
    assert killed.returncode == -9, killed.stderr
    assert runs_in(tmp_path)[0].scalars().keys() < rows.keys()  # wandb writes in blocks
    ended = process(f"{begin}; {log}; logger.finalize('success'); {kill}")
    assert ended.returncode == -9, ended.stderr
    assert runs_in(tmp_path)[1].scalars() == values
    resumed = process(f"{begin}; {log}; logger.finalize('success')")
    assert resumed.returncode == 0, resumed.stderr
    assert runs_in(tmp_path)[2].scalars() == {}


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
    expected = [row for rows in recorded.values() for row in spread_evenly(rows, COMPLETIONS)]

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


# What a process prints of WandbLogger. WANDB_BASE_URL is a server of one's own.
ACCOUNTS = """
import json, os, sys, wandb
from pathlib import Path
from rlt_lightning.run.wandb_logger import WandbLogger
from rlt_lightning.types import InputError

def mode(offline=False, start=False, **environment):
    os.environ.update(environment)
    try:
        logger = WandbLogger(offline=offline)
        return logger.experiment if start else logger._mode()[0]
    except InputError as error:
        return str(error)
    finally:
        for name in environment:
            del os.environ[name]
        wandb.teardown()  # it reads the environment once

key = {"WANDB_API_KEY": "a" * 40}
found = {"nothing": mode(), "key": mode(**key), "offline": mode(True, **key)}
found |= {"short": mode(start=True, WANDB_API_KEY="short"), "refused": mode(start=True, **key)}
found |= {name: mode(WANDB_MODE=name, **key) for name in ("online", "disabled")}
os.environ["WANDB_BASE_URL"] = "http://127.0.0.1"  # wandb 0.23 does not find a key for a host with a port
wandb.login(key="b" * 40, verify=False)
assert "b" * 40 in Path(os.environ["NETRC"]).read_text()
wandb.teardown()
found["netrc"] = mode()
Path("found.json").write_text(json.dumps(found))
"""


class Refusing(BaseHTTPRequestHandler):
    """A server of W&B that knows no key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def on_terminal(code: str, folder: Path, **environment: str) -> str:
    """Run Python on a terminal of its own, where wandb could ask for a key, and return what it shows."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        signal.alarm(1200)  # an answer to a question never comes
        os.execve(sys.executable, [sys.executable, "-c", code], os.environ | environment)
    shown = b""
    with suppress(OSError):  # the terminal's end
        while text := os.read(terminal, 4096):
            shown += text
    os.waitpid(pid, 0)
    os.close(terminal)
    return shown.decode()


@pytest.mark.full
def test_an_account_is_what_wandb_finds_and_nothing_is_asked(
    environment: pytest.MonkeyPatch, wandb_path: dict[str, str], tmp_path: Path
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        server_of_own = {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}"}
        path = {"PYTHONPATH": str(ROOT)} | wandb_path
        shown = on_terminal(ACCOUNTS, tmp_path, **server_of_own, **path)
        server.shutdown()
    assert (tmp_path / "found.json").exists(), shown
    found = json.loads((tmp_path / "found.json").read_text())
    assert "\n" not in found["short"] + found["refused"]
    assert re.search("API key must|401", found.pop("short"))  # not every version looks at a key's form
    assert "must accept the run to log online, but" in found["refused"]
    assert "401" in found.pop("refused")
    assert found == {
        **{"nothing": "offline", "key": "online", "offline": "offline", "online": "online"},
        **{"disabled": "disabled", "netrc": "online"},
    }
    logs = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    assert logs
    assert not [path for path in logs for name in "ab" if (name * 40).encode() in path.read_bytes()]


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
        build_workspace("project", "entity", "name")
        ._to_model()
        .spec.model_dump(by_alias=True, exclude_none=True)
    )
    panels = [p for section in spec["section"]["panelBankConfig"]["sections"] for p in section["panels"]]
    return [name for panel in panels for name in panel["config"].get("metrics", [])]


@pytest.mark.full
def test_the_oldest_workspaces_has_the_same_panels(tmp_path: Path) -> None:
    code = "import json; from test_dashboards import panel_metrics; print(json.dumps(panel_metrics()))"
    path = f"{install_oldest()}:{ROOT / 'tests'}:{ROOT / 'benchmarks'}"
    done = python(code, tmp_path, fresh=True, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == panel_metrics()


def test_every_metric_of_the_page_is_in_one_panel_and_no_other() -> None:
    sections = ("reward/", "student/", "policy/", "distill/", "rollout/", "perf/", "data/")
    figures = {name.replace("SET", name_of_set) for name in names_of("eval/") for name_of_set in SETS}
    overall = {f"eval/overall/{name}" for name in ("pass_at_1", "standard_error", "pass_at_k", "maj_at_k")}
    assert sorted(panel_metrics()) == sorted(names_of(*sections) | figures | overall)


def test_panels_have_the_iteration_as_their_axis_and_phases_are_stacked() -> None:
    made = build_workspace("project", "entity", "name")
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
    assert redact(kept) == kept
    hidden = redact(settings)
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
    return [[title for title, _ in alarms.find_alarms(metrics)] for metrics in iterations]


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


def test_flat_groups_leave_an_answer_term_to_learn_from() -> None:
    flat = {"reward/group_std": 0.0}
    for metrics, left in (
        (flat, "nothing to learn"),
        (flat | {"policy/answer_loss": 1.0}, "only the answer"),
    ):
        [(_, text)] = Alarms(patience=1).find_alarms(metrics)
        assert left in text


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


@pytest.mark.parametrize(
    ("drifting", "steady"),
    [(("distill/unjudged_frac", 0.1, 0.4), 1.0), (("rollout/closed_frac", 1.0, 0.7), 0.0)],
)
def test_a_form_that_drifts_rings(drifting: tuple[str, float, float], steady: float) -> None:
    name, before, after = drifting
    other = {"distill/unjudged_frac": "rollout/closed_frac"}.get(name, "distill/unjudged_frac")
    found = titles(
        Alarms(patience=2), *({name: value, other: steady} for value in [before] * 3 + [after] * 2)
    )
    assert found == [[], [], [], [], ["The form drifts"]]
    found = titles(Alarms(patience=2), *({name: value, other: steady} for value in [after] * 5))
    assert not any(found)  # it was always so
    assert not any(titles(Alarms(patience=2), *({"rollout/closed_frac": v} for v in (1.0, 1.0, 0.2, 0.2))))


@pytest.mark.full
def test_on_policy_student_at_too_high_a_rate_rings(tmp_path: Path) -> None:
    options = ["--model.optimizer.lr=5e-3", "--trainer.max_steps=20", "--checkpoint.every_n_train_steps=20"]
    result = rlt("fit", "--config=configs/miniature_opd.yaml", *options, f"--output_dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    assert "rlt: alarm: The form drifts. Iteration" in result.stderr


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
