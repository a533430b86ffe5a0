"""All stages on rows without traces: the untrained model explains, and others learn from what is kept."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from commands import ROOT, make_forked_python, rlt
from rows_of import read

from rlt_lightning import Teacher
from rlt_lightning.rewards import RLTReward
from rlt_lightning.tasks.stepwise import chain_rows

FILLER = "one goes on step by step, one gets there in the end."
ROWS = 200
# Sizes at which a stage takes seconds.
TINY = {
    "CONFIGS": "laptop/",
    "MODEL": "miniature",
    "RLT": "--trainer.max_steps 2 --data.prompts_per_step 2 --model.group_size 4",
    "OMP_NUM_THREADS": "1",
}


def write_chains(path: Path, number: int) -> Path:
    """Write rows as most people have them: a question and a solution."""
    rows = ({name: row[name] for name in ("question", "solution")} for row in chain_rows(number, seed=7))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Stage 0


def test_filler_itself_gains_nothing_over_filler() -> None:
    rows = [{**row, "reasoning_trace": FILLER} for row in chain_rows(3, seed=1)]
    scored = [
        Teacher("miniature", "miniature", reward=RLTReward(baseline=baseline), tags="r1").score(rows)
        for baseline in (FILLER, "none")
    ]
    for gain, plain in zip(*scored, strict=True):
        # r_SS - r_SS of the same text; the KL stays.
        assert gain.terms["solution"] == pytest.approx(0, abs=1e-6)
        assert gain.r_ss == pytest.approx(0, abs=1e-6)
        assert gain.r_kl == pytest.approx(plain.r_kl, abs=1e-6)
        assert plain.r_ss < -0.1


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explained")
    source = write_chains(folder / "rows.jsonl", 24)
    words = (f"--data.source={source}", "--rollouts.num_traces=4", f"--output_dir={folder / 'run'}")
    result = rlt("predict", "--config=laptop/explain", *words)
    assert result.returncode == 0, result.stderr
    assert "of 24 problems have no trace from which a student can learn" in result.stderr
    return folder / "run"


def test_stage_0_keeps_the_best_that_is_closed_and_above_filler(explained: Path) -> None:
    traces, kept = read(explained / "traces.jsonl"), read(explained / "distillation.jsonl")
    assert len(traces) == 24 * 4
    best = {}
    for row in traces:
        if row["fits"] and row["reward"] >= 0.2:
            best[row["row"]] = max(best.get(row["row"], row), row, key=lambda trace: trace["reward"])
    assert kept == [best[number] for number in sorted(best)]
    assert 0 < len(kept) < 24
    assert all(row["closed"] and "<" not in row["reasoning_trace"] for row in kept)


# All stages


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the script, whose processes are forks of one that has the package imported."""
    folder = tmp_path_factory.mktemp("own_rows")
    write_chains(folder / "rows.jsonl", ROWS)
    python = make_forked_python(folder)
    (folder / "rlt").write_text(f'#!/bin/sh\nexec {python} -m rlt_lightning "$@"\n')
    (folder / "rlt").chmod(0o755)
    variables = os.environ | TINY | {"PATH": f"{folder}:{os.environ['PATH']}"}
    words = [str(ROOT / "examples/own_rows.sh"), "rows.jsonl", "whole"]
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "whole"


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_the_script_ends_with_a_table_of_all_students(finished: Path) -> None:
    lines = (finished / "own_rows.md").read_text().splitlines()
    students = [line.split("|")[1:-1] for line in lines if line][2:9]
    assert [cells[0].strip() for cells in students] == [
        "nothing: the base",
        "raw solutions",
        "greedy traces of the warm-up teacher: the control",
        "the warm-up teacher's at T 0.7",
        "the best of 4 of these",
        "the RLT teacher's at T 0.7",
        "its greedy traces",
    ]
    for cells in students:
        assert all(re.fullmatch(r" \d+\.\d \(\d+ to \d+\) ", cell) for cell in cells[3:])
    parts = {part: read(finished / f"rows/{part}.jsonl") for part in ("train", "held_out", "test")}
    assert sum(map(len, parts.values())) == ROWS
    assert all(0 < int(cells[2]) <= len(parts["train"]) for cells in students[1:])
    assert int(students[1][2]) == len(parts["train"])
    assert [int(cells[1]) // len(parts["train"]) for cells in students[2:]] == [1, 1, 4, 1, 1]
    responses = read(finished / "evaluate_rlt_greedy/responses.jsonl")
    assert len(responses) == len(parts["test"])
    # A student of raw solutions learns to answer without steps.
    answers = read(finished / "evaluate_solutions_greedy/responses.jsonl")
    assert sum(row["num_tokens"] for row in answers) < sum(row["num_tokens"] for row in responses)
