"""docs/extend.md works as written: its files in an empty folder, its commands, the installed package."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import ROOT
from fits import metrics
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import DDPStrategy
from rows_of import read
from wandb_run import runs_in
from wheel import OFFLINE, PIP, build_wheel

from rlt_lightning.callbacks import RolloutCallback
from rlt_lightning.callbacks.rollout_checks import require_gathering
from rlt_lightning.commands.report import write_report
from rlt_lightning.datamodules import TeacherRLData
from rlt_lightning.engines import (
    Engine,
    EngineError,
    HFEngine,
    Placement,
    SampleRequest,
    Sampling,
    VLLMEngine,
)
from rlt_lightning.engines.base import stream_completions
from rlt_lightning.models.weights import NamedTensor
from rlt_lightning.modules import RLTModule
from rlt_lightning.rewards import RLTReward
from rlt_lightning.strategies.fsdp2 import FSDP2
from rlt_lightning.types import Completion, InputError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
PAGE = (ROOT / "docs" / "extend.md").read_text()
FILES = dict(re.findall(r'^```\w+ title="([\w.]+)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL))


BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = {  # by the name of the run's folder
    line.split("/")[-1]: shlex.split(line)
    for line in "".join(BLOCKS).replace("\\\n", " ").splitlines()
    if line.startswith("rlt ")
}
# The page's settings, smaller, and rows instead of the two that it shows.
SMALL = ["--trainer.max_steps=2", "--data.prompts_per_step=2", "--model.group_size=2"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as users have it: a wheel, installed in a folder of its own."""
    folder = tmp_path_factory.mktemp("installed")
    install = [*PIP, "install", str(build_wheel(folder)), *OFFLINE, "--target", str(folder / "site")]
    subprocess.run(install, check=True, timeout=570)
    site = folder / "site"
    where = [sys.executable, "-c", "import rlt_lightning; print(rlt_lightning.__file__)"]
    found = subprocess.run(where, cwd=folder, env=outside_the_checkout(site), capture_output=True, text=True)
    assert site in Path(found.stdout.strip()).parents, found.stderr
    return site


def outside_the_checkout(installed: Path) -> dict[str, str]:
    """Return an environment in which the package is the installed one."""
    path = {"PYTHONPATH": str(installed), "PATH": f"{installed / 'bin'}:{os.environ['PATH']}"}
    return dict(os.environ) | path


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's files and nothing else."""
    folder = tmp_path_factory.mktemp("outside")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def run(words: list[str], installed: Path, outside: Path, *options: str) -> None:
    """Run a command of the page, with further options, where nothing of the checkout can be found."""
    program = str(installed / "bin" / words[0])  # `rlt`, the console script
    result = subprocess.run(
        [program, *words[1:], *options],
        cwd=outside,
        env=outside_the_checkout(installed),
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert result.returncode == 0, result.stderr


def of_models(folder: str) -> list[str]:
    """The tiny model in place of SmolLM2-135M: what the page's commands lack, and all that they are given."""
    return ["--model.teacher", folder, "--model.student", folder]


# The callbacks, the loss, the engine, the data


@pytest.mark.full
def test_a_metric_of_ones_own_is_logged(installed: Path, outside: Path) -> None:
    run(COMMANDS["distinct"], installed, outside, *SMALL)
    for row in metrics(outside / "runs" / "distinct").values():
        assert row["rollout/distinct_frac"] in (0.25, 0.5, 0.75, 1)


@pytest.mark.full
def test_term_and_callback_become_charts_in_wandb(installed: Path, outside: Path) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    run(COMMANDS["together"], installed, outside, *SMALL)
    folder = outside / "runs" / "together"
    assert "project: mine" in (folder / "config.yaml").read_text()
    [logged] = runs_in(folder)
    assert {"reward/brevity", "rollout/distinct_frac"} <= logged.scalars()[2].keys()


@pytest.mark.full
def test_a_loss_of_ones_own_trains_without_a_clip(installed: Path, outside: Path) -> None:
    options = [
        "--model.num_epochs=2",
        "--model.policy_loss.clip_eps_low=0",
        "--model.policy_loss.clip_eps_high=0",
    ]
    run(COMMANDS["unclipped"], installed, outside, *SMALL, *options)
    [*_, last] = metrics(outside / "runs" / "unclipped").values()
    assert last["policy/clip_frac"] == 0
    assert last["policy/ratio_mean"] != 1


@pytest.mark.full
def test_the_engine_of_the_page_samples(installed: Path, outside: Path) -> None:
    run(COMMANDS["generate_engine"], installed, outside, "--model.group_size=2")
    recorded = read(outside / "runs" / "generate_engine" / "rollouts.jsonl")
    assert len(recorded) == 8
    assert {row["policy_version"] for row in recorded} == {0, 1}
    assert "stop" in {row["finish_reason"] for row in recorded}


@pytest.mark.full
def test_data_of_ones_own_name_their_columns(installed: Path, outside: Path) -> None:
    run(COMMANDS["answers"], installed, outside, *SMALL)
    recorded = read(outside / "runs" / "answers" / "rollouts.jsonl")
    assert {row["question"] for row in recorded} == {"start 4, add 3, times 7?", "start 5, times 3, add 4?"}
    assert {row["solution"].strip() for row in recorded} == {"\\boxed{9}"}


# The reward term


SCORES = """trainer: {accelerator: cpu}
model: {class_path: rlt_lightning.modules.RLTModule}
data:
  class_path: rlt_lightning.datamodules.ScoringData
  init_args: {source: rows.jsonl, tags: r1}
"""
ROW = {"question": "What is 12 + 30?", "solution": "It is 42."}
TRACES = ["Ten and thirty are forty, and two are left.", "So."]


@pytest.mark.full
def test_a_term_of_ones_own_is_added_logged_recorded_and_reported(
    installed: Path, outside: Path, tiny_model: str
) -> None:
    validated = ["--data.val_rows=2", "--trainer.val_check_interval=2"]
    run(COMMANDS["brevity"], installed, outside, *SMALL, *validated, "--model.reward.word_weight=0.5")
    (outside / "scores.yaml").write_text(SCORES)
    lines = [json.dumps({**ROW, "reasoning_trace": trace}) for trace in TRACES]
    (outside / "rows.jsonl").write_text("\n".join(lines) + "\n")
    reward = ["--model.reward=brevity.BrevityReward", "--output_dir=runs/scores"]
    run(["rlt", "predict", "--config=scores.yaml", *reward], installed, outside, *of_models(tiny_model))
    folder = outside / "runs" / "brevity"
    assert "word_weight: 0.5" in (folder / "config.yaml").read_text()
    [*_, last] = metrics(folder).values()
    parts = [last[f"reward/{name}"] for name in ("solution", "kl", "format", "brevity")]
    assert last["reward/mean"] == pytest.approx(sum(parts), rel=1e-5)
    assert last["reward/val_brevity"] < 0
    scored = read(outside / "runs" / "scores" / "scores.jsonl")
    assert [row["brevity_reward"] for row in scored] == pytest.approx([-0.09, -0.01])  # 9 words, and one
    for row in [*read(folder / "rollouts.jsonl"), *scored]:
        names = ("solution_reward", "kl_reward", "format_reward", "brevity_reward")
        assert row["reward"] == pytest.approx(sum(row[name] for name in names), rel=1e-5)

    page = write_report(folder).read_text()
    assert "<code>reward/brevity</code>" in page
    assert "<code>reward/val_brevity</code>" in page
    assert "brevity_reward -0.0" in write_report(outside / "runs" / "scores").read_text()


class Terms(RLTReward):
    extra_names = ("one", "two")


CLOSED = torch.tensor([True, False])
ONE, TWO = torch.arange(2), torch.full((2,), 0.5)


def test_terms_come_in_the_order_of_their_names_as_numbers_of_the_reward() -> None:
    terms = Terms().check_extra_terms({"two": TWO, "one": ONE}, CLOSED)
    assert {name: values.tolist() for name, values in terms.items()} == {"one": [0, 1], "two": [0.5, 0.5]}
    assert list(terms) == ["one", "two"]
    assert {values.dtype for values in terms.values()} == {torch.float32}


@pytest.mark.parametrize(
    "terms", [{"one": ONE}, {"one": ONE[:, None], "two": TWO}, {"one": ONE, "two": TWO.mean()}]
)
def test_a_term_that_is_none_is_refused(terms: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"Terms\.extra_terms must return a tensor \(2,\)"):
        Terms().check_extra_terms(terms, CLOSED)


# The engine


class FourMethods(Engine):
    """The least that an engine must have."""

    def start(self, model: Any, tokenizer: Any, folder: Path) -> None: ...

    def sample(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> Iterator[tuple[int, Completion]]:
        yield from ()

    def update_weights(self, named_tensors: list[NamedTensor], policy_version: int) -> None:
        self.policy_version = policy_version

    def verify(self, token_ids: list[int], log_probs: dict[int, list[float]]) -> None: ...


def test_four_methods_make_an_engine() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--engine", type=Engine)
    config = parser.parse_args([f"--engine={__name__}.FourMethods"])
    engine = parser.instantiate_classes(config).engine
    assert isinstance(engine, FourMethods)
    assert engine.policy_version == -1
    assert engine.placement is Placement.SERVER
    assert not engine.load_own_model("teacher")


def test_an_engine_that_loses_completions_is_named() -> None:
    with pytest.raises(
        EngineError, match=r"FourMethods.sample must yield every completion .* 2 did not come"
    ):
        list(stream_completions(FourMethods(), [SampleRequest([5], 0, 2)], Sampling(), ""))


def test_sharded_weights_need_an_engine_that_gathers() -> None:
    strategy = FSDP2()
    strategy.parallel_devices = [torch.device("cpu")] * 2  # as a trainer sets them
    sharded = SimpleNamespace(world_size=2, strategy=strategy, datamodule=TeacherRLData())
    module = RLTModule()
    with pytest.raises(InputError, match="FourMethods does not write gather_weights"):
        RolloutCallback(FourMethods()).setup(sharded, module, "validate")  # type: ignore[arg-type]
    for engine in (VLLMEngine(["http://127.0.0.1:8000"]), HFEngine()):
        require_gathering(engine, sharded)  # type: ignore[arg-type]
    for whole in ({"world_size": 1}, {"strategy": DDPStrategy()}):
        require_gathering(FourMethods(), SimpleNamespace(**vars(sharded) | whole))  # type: ignore[arg-type]
