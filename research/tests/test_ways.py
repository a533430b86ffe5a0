"""Three ways to teach: on-policy training learns what only the solution tells, and its control does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import driver
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


def test_standard_errors_are_those_of_a_difference_of_shares() -> None:
    # 50 % and 20 % of 100 problems: 0.3 / sqrt((0.25 + 0.16) / 100).
    assert ways.compute_errors(50.0, 20.0, 100) == pytest.approx(0.3 / 0.0041**0.5)


@pytest.mark.slow
def test_a_student_learns_on_policy_what_only_the_solution_tells(tmp_path: Path) -> None:
    names = ["base", "opd_warmup", "opd_warmup_wrong"]
    found = driver.run("ways", Ways, Stages(tmp_path), [NEW], [0], names)["settings"]["new"]["arms"]
    rises = [found[arm]["standard errors above base"][0] for arm in names[1:]]
    print(f"figure: standard errors above the untrained student {rises}")
    assert rises[0] >= 3 > rises[1], rises


@pytest.mark.full
def test_the_comparison_runs_at_tiny_size(tmp_path: Path) -> None:
    tiny = {"num_warmup": 32, "num_warmup_epochs": 1, "num_traces": 16, "num_test": 8, "num_iterations": 1}
    setting = replace(NEW, student_epochs=2, **tiny)
    names = ["base", "rlt", "best_of_4", "opd_rlt", "opd_self", "opd_rlt_wrong"]
    stages = Stages(tmp_path)
    found = driver.run("ways", Ways, stages, [setting], [0], names)["settings"]["new"]
    assert list(found["arms"]) == names
    assert {arm for arm, figures in found["arms"].items() if "traces" in figures} == {"rlt", "best_of_4"}
    one = Ways(stages, setting, 0)
    assert len(read(one.folder / "warmup/traces_16_t0.7/traces.jsonl")) == 16 * 16
    rows = read(one.folder / "opd_self/student/rollouts.jsonl")
    assert len(rows) == 32  # two epochs of 16 problems
    [table] = found["tables"].values()
    assert {name.split(",")[0] for name in table} == {"base", "rlt"}
    # Shown another number than the right one, no model gives both at once.
    assert all(0 <= row["right"] + row["shown"] <= 100.1 for name, row in table.items() if "wrong" in name)
    for name in ("ways.json", "ways.md", "ways.svg"):
        assert (tmp_path / name).exists()
