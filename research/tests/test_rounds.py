"""Teach what only the solution tells: the arms of research/rounds.py, and examples/rounds.sh."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import driver
import pytest
import rounds
import rounds_questions as questions
import yaml
from arms import read
from rounds import Rounds
from stages import Stages
from trace_kinds import chain_kind, parse_chain

from rlt_lightning.tasks.stepwise import NEW_MIXTURE, NEW_OPERATIONS, chain_rows
from rlt_lightning.types import InputError

ROOT = Path(__file__).parents[2]
GREEDY = ("warmup/traces_0", "t0_rlt_s16/traces")  # traces of t0_s16 and of t0_rlt_s16


@pytest.mark.slow
def test_rounds_teach_what_only_the_solution_tells(tmp_path: Path) -> None:
    programs = {"bin/make": "true", ".venv/bin/rlt": f'exec {sys.executable} -m rlt_lightning "$@"'}
    for name, line in programs.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    subprocess.run([tmp_path / "examples/rounds.sh"], check=True, env=environment)
    found = []
    for path in sorted(tmp_path.glob("runs/rounds/*/evaluation/evaluation.json")):
        [tested] = json.loads(path.read_text())["sets"].values()
        found.append(100 * tested["pass_at_1"])
    print(f"figure: accuracy in percent, by round {found}")
    assert found[0] < 20
    assert found[2] > 95


@pytest.mark.parametrize(
    ("arm", "named"),
    [
        *((arm, arm) for arm in ("s", "reject_s64", "best0_s4", "raw", "t0_base", "t0_d64", "t0_oracle")),
        ("rlt_64", "64"),
        ("rlt_reject_s4", "reject_s4"),
    ],
)
def test_an_unknown_arm_is_refused(arm: str, named: str) -> None:
    with pytest.raises(InputError, match=rf"but names {named}\. Correct it"):
        rounds.read_arm(arm)


@pytest.mark.full
def test_the_arms_run_at_tiny_size(tmp_path: Path) -> None:
    tiny = {"num_warmup": 96, "num_warmup_epochs": 1, "num_traces": 24, "num_test": 8, "num_iterations": 1}
    setting = replace(Rounds.SETTINGS["few64"], num_pool=512, **tiny)
    names = ["base", "rlt_s16", "wrong_s16", "exactbest2_s16", "d16", "pool2_d16", "t0_s16", "t0_rlt_s16"]
    found = driver.run("rounds", Rounds, Stages(tmp_path), [setting], [0], names)["settings"]["few64"]
    assert list(found["arms"]) == names
    assert [found["arms"][name]["rows"] for name in names[1:]] == [[24], [24], [24], [16], [24], [16], [24]]
    assert len(found["tables"]) == 2  # rewards under base and d16
    seed = tmp_path / "few64/seed0"
    has_new = [
        parse_chain(row["question"]).steps[-1].split()[1:3] for row in read(seed / "data/warmup.jsonl")
    ]
    has_new = [(name, int(number)) in NEW_OPERATIONS for name, number in has_new]
    assert has_new == [True] * 64 + [False] * 32
    assert read(seed / "data/d16.jsonl") == read(seed / "data/warmup.jsonl")[:16]
    [shown, right] = [
        {row["question"]: row["solution"] for row in read(seed / f"data/{name}.jsonl")}
        for name in ("wrong", "rlt")
    ]
    assert shown.keys() == right.keys()
    assert not any(shown[question] == right[question] for question in right)
    settings = yaml.safe_load((seed / "rlt_s16/teacher/config.yaml").read_text())["model"]["init_args"]
    assert settings["student"] == str(seed / "s16/student/model")
    assert settings["teacher"] == str(seed / "warmup/teacher/model")
    written = [yaml.safe_load((seed / name / "config.yaml").read_text()) for name in GREEDY]
    assert [settings["rollouts"]["sampling"]["temperature"] for settings in written] == [0, 0]
    teachers = [settings["model"]["init_args"]["teacher"] for settings in written]
    assert teachers == [str(seed / f"{arm}/teacher/model") for arm in ("warmup", "rlt_s16")]


def test_rare_breaks_off_right_traces_at_their_last_step_only() -> None:
    rows = chain_rows(400, last=NEW_OPERATIONS, mixture=NEW_MIXTURE)
    broken = rounds.break_last_steps(rows, 0.6, seed=0)
    pairs = [
        [chain_kind(row["question"], row["reasoning_trace"]) for row in pair]
        for pair in zip(rows, broken, strict=True)
    ]
    assert all(before == after for before, after in pairs if before[0] != "steps")
    ends = [after for before, after in pairs if before[0] == "steps"]
    assert {num_right for kind, num_right in ends if kind != "steps"} == {4}
    # 131 of 400 are right (0.8^5 of them expected), and stay so with a chance of 0.4.
    assert 0.3 < sum(kind == "steps" for kind, _ in ends) / len(ends) < 0.5
    assert {"filler", "leap"} <= {kind for kind, _ in ends}


def test_the_best_of_k_is_chosen_among_the_first_k_traces_of_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(questions, "DRAWS", (1, 2, 3))
    traces = [
        "one knows how it goes, one takes the next part.",
        "2 add 1 is 3, 3 times 7 is 1.",
        "clearly it must be 1.",
    ]
    rows = [
        {"question": "start 2, add 1, times 7?", "reasoning_trace": trace, "reward": reward}
        for trace, reward in zip(traces, (-2.0, -1.0, -0.5), strict=True)
    ]
    found = questions.choose_best(rows)
    assert [[row["reasoning_trace"] for row in some] for some in found.values()] == [
        [text] for text in traces
    ]


def test_ends_of_traces_are_counted_by_the_number_they_name() -> None:
    def row(trace: str) -> dict[str, str]:
        return {"question": "start 2, add 1, times 7?", "solution": "\\boxed{5}", "reasoning_trace": trace}

    rows = [row("3 times 7 is 5."), row("3 times 7 is 1."), row("3 times 7 is 2."), row("one knows.")]
    assert questions.measure_ends(rows) == dict.fromkeys(
        ("ends with number shown", "right number", "another", "no number"), 25.0
    )


def test_a_trace_leaves_the_steps_behind_the_comma_of_its_last_right_one() -> None:
    tokens = ["2", " add", " 1", " is", " 3", ",", " clearly", " it", " must", " be", " 1", "."]
    assert tokens[questions.find_leaving(tokens, 1)] == " clearly"
    assert questions.find_leaving(tokens, 0) == 0
    assert questions.find_leaving(tokens, 2) == 6  # all right: its last step
