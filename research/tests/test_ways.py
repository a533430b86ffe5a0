"""Three ways to teach: on-policy training learns what only the solution tells, and its control does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ways
from arms import read
from stages import Stages
from ways import NEW, Ways

from rlt_lightning.tasks.stepwise import NEW_OPERATIONS, OPERATIONS, chain_rows


def test_only_the_last_operation_of_a_problem_is_new() -> None:
    new = {f"{name} {number}" for name, number in NEW_OPERATIONS}
    assert not new & {f"{name} {number}" for name, number in OPERATIONS}
    for row in chain_rows(64, last=NEW_OPERATIONS):
        _, *operations = row["question"].removesuffix("?").split(", ")
        assert [operation in new for operation in operations] == [False] * 4 + [True]


def test_standard_errors_are_those_of_a_difference_of_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    # 50 % and 20 % of 100 problems: 0.3 / sqrt((0.25 + 0.16) / 100).
    monkeypatch.setattr(ways, "read_accuracy", lambda one, arm: {"opd_rlt": 50.0, "base": 20.0}[arm])
    one: Any = SimpleNamespace(setting=replace(NEW, num_test=100))
    assert ways.standard_errors(one, "opd_rlt") == pytest.approx(0.3 / 0.0041**0.5)


@pytest.mark.slow
def test_a_student_learns_on_policy_what_only_the_solution_tells(tmp_path: Path) -> None:
    stages = Stages(tmp_path)
    stages.start()
    one = Ways(stages, NEW, seed=0)
    one.run(["base", "opd_warmup", "opd_warmup_wrong"])
    rises = {arm: ways.standard_errors(one, arm) for arm in ("opd_warmup", "opd_warmup_wrong")}
    print(f"figure: standard errors above the untrained student {rises}")
    assert rises["opd_warmup"] >= 3 > rises["opd_warmup_wrong"], rises


TRACES = ("rlt/traces_rlt_t0", "warmup/traces_best_of_4")


@pytest.mark.full
def test_the_comparison_runs_at_tiny_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"num_warmup": 32, "num_warmup_epochs": 1, "num_traces": 16, "num_test": 8, "num_iterations": 1}
    tiny |= {"student_epochs": 2}
    monkeypatch.setattr(ways, "NEW", replace(NEW, **tiny))
    arms = ["base", "rlt", "rlt_t0", "best_of_4", "opd_rlt", "opd_self", "opd_rlt_wrong"]
    ways.run(tmp_path, [0], arms, ["new"], num_workers=2)
    found = json.loads((tmp_path / "ways.json").read_text())["tasks"]["new"]
    assert list(found["arms"]) == arms
    assert found["traces"].keys() == {"rlt", "rlt_t0", "best_of_4"}
    rows = [read(tmp_path / "new/seed0" / name / "traces.jsonl") for name in TRACES]
    assert [len(some) for some in rows] == [16, 4 * 16]
    again = read(tmp_path / "new/seed0/rlt/traces/traces.jsonl")
    assert [row["reasoning_trace"] for row in rows[0]] != [row["reasoning_trace"] for row in again]
    cost = found["costs"]["on-policy training of a student"]
    assert cost["optimizer_steps"] == 2  # two epochs of 16 problems
    rows = read(tmp_path / "new/seed0/opd_self/student/rollouts.jsonl")
    assert len(rows) == 32
    assert (tmp_path / "ways.md").read_text().count("control: RLT teacher, wrong solutions") == 2
    assert "<svg" in (tmp_path / "ways.svg").read_text()
