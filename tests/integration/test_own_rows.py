"""All stages on rows without traces: the untrained model explains, and others learn from what is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from commands import ROOT, living, make_forked_python, run_rlt, start_fresh
from own_rows import choose_rows
from rows_of import read, write

from rlt_lightning import Teacher
from rlt_lightning.callbacks import RolloutCallback
from rlt_lightning.engines.base import Sampling
from rlt_lightning.rewards import RLTReward
from rlt_lightning.run.shipped import find_config
from rlt_lightning.tasks.stepwise import chain_rows

FILLER = "one goes on step by step, one gets there in the end."
ROWS = 200
# Sizes at which a stage takes seconds.
TINY = {
    "CONFIGS": "laptop/",
    "MODEL": "miniature",
    "RLT": "--trainer.max_steps 6 --data.prompts_per_step 2 --model.group_size 4",
    "OMP_NUM_THREADS": "1",
}


def write_chains(path: Path, number: int, has_traces: bool = False) -> Path:
    """Write rows as most people have them: a question and a solution."""
    names = ["question", "solution", *(["reasoning_trace"] if has_traces else [])]
    rows = ({name: row[name] for name in names} for row in chain_rows(number, seed=7))
    return write(path, rows)


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
    result = run_rlt("predict", "--config=laptop/explain", *words)
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


class Ladder:
    """Runs of the script in a folder; its processes are forks of one that has the package imported."""

    def __init__(self, folder: Path, has_traces: bool = False, number: int = ROWS, **variables: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_chains(folder / "rows.jsonl", number, has_traces)
        python = make_forked_python(folder)
        (folder / "rlt").write_text(f'#!/bin/sh\nexec "{python}" -m rlt_lightning "$@"\n')
        (folder / "rlt").chmod(0o755)
        self.folder = folder
        self.environment = TINY | {"PATH": f"{folder}:{os.environ['PATH']}"} | variables

    def start(self, run: str, log: Path, **variables: str) -> subprocess.Popen[bytes]:
        words = [str(ROOT / "examples/own_rows.sh"), "rows.jsonl", run]
        return start_fresh(words, log, self.folder, **self.environment | variables)

    def climb(self, run: str, **variables: str) -> Path:
        """Run the script to its end, and return its folder."""
        log = self.folder / "log"
        status = self.start(run, log, **variables).wait()
        assert status == 0, log.read_text()[-5000:]
        return self.folder / run

    def kill(self, run: str, begun: str, ended: str, **variables: str) -> None:
        """Kill the script and all that it has started, after one file is there and before another is."""
        log = self.folder / "killed"
        script = self.start(run, log, **variables)
        while not any((self.folder / run).glob(begun)):
            assert script.poll() is None, log.read_text()[-5000:]
            time.sleep(0.02)
        os.killpg(script.pid, signal.SIGKILL)
        script.wait()
        for command in list(living):
            command.killpg()
        assert not (self.folder / run / ended).exists(), "it was killed too late"


def read_tables(run: Path) -> tuple[list[list[str]], dict[str, list[str]], list[str]]:
    """Return the costs of stages and the rungs, cells by cells, without their titles, and the last lines."""
    page = (run / "own_rows.md").read_text().splitlines()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page if line.startswith("|")]
    titles = [number for number, cells in enumerate(lines) if cells[1] == "---"]
    rungs = {cells[0]: cells[1:] for cells in lines[titles[1] + 1 :]}
    return lines[2 : titles[1] - 1], rungs, [line for line in page if line and line[0] != "|"]


def drop_hours(run: Path) -> tuple[object, ...]:
    stages, rungs, notes = read_tables(run)
    return (
        [cells[:4] + cells[5:] for cells in stages],
        {name: cells[:4] + cells[5:] for name, cells in rungs.items()},
        notes,
    )


def test_first_rungs_survive_a_kill_in_any_folder(tmp_path: Path) -> None:
    ladder = Ladder(
        tmp_path / "rows", number=60, OWN="--data.prompts_per_step 8", UNTIL="evaluate_own_sampled"
    )
    name = '#1 it\'s {mine}, "so"'
    ladder.kill(name, "own/traces.jsonl", "own/distillation.jsonl")
    run = ladder.climb(name)
    train, test = read(run / "rows/train.jsonl"), read(run / "rows/test.jsonl")
    assert len(read(run / "own/traces.jsonl")) == 4 * len(train)
    kept = read(run / "own/distillation.jsonl")
    assert 0 < len(kept) <= len(train)
    # The student learns from a few rows again and again, so that it takes as many steps as from all.
    learned = read(run / "chosen/student_own.jsonl")
    assert len(learned) == len(kept) * round(len(train) / len(kept))
    assert not (run / "student_own/checkpoints").exists()
    assert (run / "student_own/model/config.json").exists()
    _, rungs, notes = read_tables(run)
    base, own = rungs["nothing: the base"], rungs["its own right answers, of 4"]
    assert base[:3] == ["", "0", "0"]
    assert own[:2] == [str(len(kept)), str(4 * len(train))]
    assert own[2] == f"{sum(row['num_tokens'] for row in read(run / 'own/traces.jsonl')):,}"
    assert [line.split(" the cheapest")[0] for line in notes] == ["Greedily", "At T 0.7"]
    assert f"by {len(test)} test rows" in notes[0]


def test_a_student_never_right_ends_no_ladder(tmp_path: Path) -> None:
    # No answer of 2 tokens is right: rlt predict ends with an error, and the next rung begins.
    short = "--rollouts.sampling.max_completion_length 2"
    ladder = Ladder(tmp_path, number=60, OWN=short, ANSWER=short, UNTIL="student_solutions")
    run = ladder.climb("run")
    assert (run / "own/distillation.jsonl").read_text() == ""
    assert not (run / "student_own").exists()
    assert (run / "student_solutions/model/config.json").exists()
    _, _, notes = read_tables(run)
    assert notes[0] == "Left out, for want of a row to learn from: its own right answers, of 4."
    # It stops where it should although that stage is left out.
    assert "stopped after student_own" in (ladder.climb("run", UNTIL="student_own") / "../log").read_text()


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_expert_iteration_learns_from_traces_above_the_gap() -> None:
    def trace(reward: float, baseline: float = -1.0) -> dict[str, float]:
        return {"reward": reward - baseline, "baseline": baseline}  # a gain over the row's filler

    right = [trace(-0.4 - 0.01 * i, -0.5 if i % 2 else -3.0) for i in range(20)]
    rest = [trace(-0.9 - 0.01 * i, -4.0) for i in range(100)]  # they gain more over their fillers
    assert choose_rows("gap", rest + right, 160) == right
    assert choose_rows("gap", rest, 60) == rest[:30]  # no gap: at most an eighth of the 4 * 60 traces
    assert choose_rows("gap", right[:1], 160) == right[:1]
    assert choose_rows("gap", [], 160) == []


def test_a_stage_that_is_none_is_refused(tmp_path: Path) -> None:
    words = ["bash", str(ROOT / "examples/own_rows.sh")]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    until = os.environ | {"UNTIL": "evaluate_expert", "PATH": path}
    done = subprocess.run([*words, "rows.jsonl"], env=until, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "such as evaluate_expert_sampled, but is evaluate_expert" in done.stderr
    assert not list(tmp_path.iterdir())
    assert "From cheap to dear" in subprocess.run([*words, "--help"], capture_output=True, text=True).stdout


@pytest.mark.parametrize("has_traces", [False, True])
def test_a_ladder_killed_twice_has_the_same_table(has_traces: bool, tmp_path: Path) -> None:
    often = {"TRAIN": "--checkpoint.every_n_train_steps 2"}
    whole = Ladder(tmp_path / "whole", has_traces, **often).climb("run")
    ladder = Ladder(tmp_path / "killed", has_traces, **often)
    ladder.kill("run", "student_solutions/checkpoints/step=*.ckpt/*.xxh128", "student_solutions/model")
    ladder.kill("run", "rlt/checkpoints/step=*.ckpt/*.xxh128", "rlt/model")
    assert drop_hours(ladder.climb("run")) == drop_hours(whole)

    number = len(read(whole / "rows/train.jsonl"))
    _, rungs, notes = read_tables(whole)
    samples = {name: int(cells[1].replace(",", "")) for name, cells in rungs.items()}
    explained = 0 if has_traces else 4 * number  # stage 0
    # RLT samples in 6 steps 2 problems * 4.
    expected = {
        "nothing: the base": 0,
        "its own right answers, of 4": 4 * number,
        "raw solutions": 0,
        "greedy traces of the warm-up teacher": explained + number,
        "its traces at T 0.7": explained + 4 * number,
        "the best of 4 of these": explained + 4 * number,
        "the best quarter of those": explained + 4 * number,
        "expert iteration: greedy traces": explained + 4 * number + number,
        "the RLT teacher's traces at T 0.7": explained + 48 + number,
        "the RLT teacher's greedy traces": explained + 48 + number,
    }
    if has_traces:
        expected |= {"raw traces": 0, "greedy traces of a teacher of the best eighth of these": number}
    assert samples == expected
    # The cheapest comes first, and the last lines name rungs of the table with their accuracies.
    tokens = [sum(int(cell.replace(",", "")) for cell in cells[2:4]) for cells in rungs.values()]
    assert tokens == sorted(tokens)
    for place, line in zip((-2, -1), notes[-2:], strict=True):
        best = max(float(cells[place].split()[0]) for cells in rungs.values())
        assert f"({best:.1f} %)" in line.partition("The best is")[2]
    # Nothing is sampled twice.
    traces = [row for row in read(whole / "traces/traces.jsonl") if row["fits"]]
    chosen = {
        name: read(whole / f"chosen/student_{name}.jsonl") for name in ("warmup", "best_of_4", "quarter")
    }
    assert all(row in traces for rows in chosen.values() for row in rows)
    assert {row["trace"] for row in chosen["warmup"]} == {0}
    assert not [*whole.glob("*/checkpoints"), *whole.glob("*/reference")]


def test_shipped_teachers_explain_greedily_too() -> None:
    # At temperature 0 a trace that is sampled again is the same, so max_resamples is refused.
    settings = yaml.safe_load(find_config("own_rows/generate").read_text())["rollouts"]
    RolloutCallback(**settings | {"sampling": Sampling(temperature=0)})
