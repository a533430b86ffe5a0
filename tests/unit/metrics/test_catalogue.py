"""One entry in the catalogue makes a metric appear everywhere; no other place lists names of metrics."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import metrics_page
import pytest
from browser import SCORED, completion, write_metrics, write_rows

from rlt_lightning.callbacks import Alarms
from rlt_lightning.commands.explain import describe_worth
from rlt_lightning.commands.report import write_report
from rlt_lightning.datamodules.evaluation_sets import SETS
from rlt_lightning.metrics import catalogue
from rlt_lightning.metrics.catalogue import (
    OURS,
    SET_TITLES,
    build_student_metrics,
    find_metric,
    label_columns,
    read_entries,
    register,
    reward_term,
    write_entries,
)
from rlt_lightning.rewards import RLTReward
from rlt_lightning.types import InputError

PAGE = metrics_page.PAGE.read_text()
PACKAGE = """
from dataclasses import dataclass

import torch

from rlt_lightning.rewards import RLTReward
from rlt_lightning.metrics.catalogue import reward_term

BREVITY = reward_term("brevity", "Brevity term", "−0.01 · words of the explanation", "rises towards 0")


@dataclass(frozen=True)
class BriefReward(RLTReward):
    extra_names = ("brevity",)

    def extra_terms(self, rollouts):
        return {"brevity": torch.tensor([-0.01 * len(r.text.split()) for r in rollouts])}
"""


@pytest.fixture
def brief_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A class outside the package, with its one entry in the catalogue."""
    folder = tmp_path / "installed"
    folder.mkdir()
    (folder / "brief.py").write_text(PACKAGE)
    monkeypatch.setattr(catalogue, "entries", {metric.name: metric for metric in OURS})
    monkeypatch.syspath_prepend(folder)
    brief = importlib.import_module("brief")
    catalogue.register(brief.BREVITY)
    yield brief.BriefReward
    del sys.modules["brief"]


def test_one_entry_shows_a_new_term_everywhere(brief_reward: Any, tmp_path: Path) -> None:
    assert brief_reward().columns()[-1] == "brevity_reward"
    run = tmp_path / "run"
    rewards = {"reward/mean": [-2.0, -1.0], "reward/brevity": [-0.3, -0.2], "reward/val_brevity": ["", -0.1]}
    write_metrics(run, rewards)
    write_rows(
        run / "rollouts.jsonl", [completion(1, 0, n, -2.0, brevity_reward=-0.3 - n / 10) for n in range(2)]
    )
    page = write_report(run).read_text()
    assert "Brevity term <code>reward/brevity</code>" in page
    assert "Brevity term, held-out <code>reward/val_brevity</code>" in page
    assert "Brevity term -0.3" in page  # of a completion

    scored = {"question": "Q", "solution": "S", "reasoning_trace": "T", "level": 3, "reward": -1.0}
    write_rows(tmp_path / "scored" / "scores.jsonl", [scored | {"brevity_reward": -0.5}])
    page = write_report(tmp_path / "scored").read_text()
    assert "reward -1 · Brevity term -0.5" in page
    assert "level" not in page

    parts = {"solution": -1.0, "brevity": -0.25}
    text = "\n".join(describe_worth(SCORED, SCORED, parts, RLTReward(), top=1))
    assert "  brevity   -0.2500  −0.01 · words of the explanation\n" in text


def test_a_run_folder_keeps_entries_that_are_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {metric.name: metric for metric in OURS}
    monkeypatch.setattr(catalogue, "entries", dict(ours))
    write_entries(tmp_path)
    assert not list(tmp_path.iterdir())
    read_entries(tmp_path)
    brevity = reward_term("brevity", "Brevity term", "−0.01 · words", "rises towards 0")
    register(brevity)
    write_entries(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["catalogue.json"]
    monkeypatch.setattr(catalogue, "entries", dict(ours))
    assert "brevity_reward" not in label_columns()
    read_entries(tmp_path)
    assert find_metric("reward/brevity") == brevity
    assert label_columns()["brevity_reward"] == "Brevity term"


@pytest.mark.parametrize("text", ["[", "[3]", '[{"name": "reward/a"}]', '[{"nam": "reward/a"}]', "3"])
def test_entries_that_rlt_did_not_write_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "catalogue.json").write_text(text)
    with pytest.raises(InputError, match=r"catalogue\.json must hold the entries of metrics that rlt wrote"):
        read_entries(tmp_path)


def test_the_tables_of_the_page_are_those_of_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "entries", {metric.name: metric for metric in OURS})
    register(*build_student_metrics("miniature"))  # as a run in this process does
    assert metrics_page.write_tables(PAGE) == PAGE, "run `python scripts/metrics_page.py`"
    assert PAGE.count("<!-- catalogue: ") == 14
    with pytest.raises(ValueError, match="has none for 'nothing'"):
        metrics_page.write_tables("<!-- catalogue: nothing -->\n<!-- end -->")


def test_an_entry_keeps_its_text() -> None:
    with pytest.raises(ValueError, match="'reward/kl' is in the catalogue already"):
        register(replace(find_metric("reward/kl"), title="Mine"))
    register(find_metric("reward/kl"))  # the same entry again changes nothing


def test_names_that_code_uses_are_in_the_catalogue() -> None:
    names = {metric.name for metric in OURS}
    assert set(Alarms().limits) <= names
    assert {*RLTReward().columns(), "correct", "formatted", "timed_out"} <= label_columns().keys()
    assert list(SETS) == list(SET_TITLES)
