"""Slow tests that runs learn and a control does not: `make prove`, half an hour on two cores."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import learning
import pytest
from arms import read
from trace_kinds import word_sum_kind

ROOT = Path(__file__).parents[2]


def test_rise_compares_explanations_of_the_same_problems() -> None:
    # Rises of 3 and 1: mean 2, variance 2, squared error 2 / 2.
    before = [{"question": "a", "reward": -3}, {"question": "b", "reward": -9}]
    after = [{"question": "a", "reward": 0}, {"question": "b", "reward": -8}]
    assert learning.rise(before, after, "reward") == pytest.approx((2.0, 1.0))
    with pytest.raises(SystemExit, match="same problems"):
        learning.rise(before, after[::-1], "reward")


@pytest.mark.slow
def test_rlt_makes_more_traces_right_and_the_control_does_not(tmp_path: Path) -> None:
    rlt = [sys.executable, "-m", "rlt_lightning"]
    single, student = ["--trainer.precision=32-true"], ["--model.student_dtype=float32"]
    fit = [*rlt, "fit", "--config=configs/laptop/smollm2_rlt.yaml", *single, *student]
    fit += ["--trainer.max_steps=12"]
    predict = [
        *rlt,
        "predict",
        "--config=configs/laptop/smollm2_generate.yaml",
        "--data.num_embedded_rows=64",
    ]
    predict += [*student, "--model.dtype=float32"]
    warm, shuffled = tmp_path / "warmup" / "model", "rlt_lightning.numerics.advantages.ShuffledAdvantages"
    traces = {}
    for name, command in {
        "warmup": [*rlt, "fit", "--config=configs/laptop/smollm2_warmup.yaml", *single],
        "rlt": [*fit, f"--model.teacher={warm}"],
        "control": [*fit, f"--model.teacher={warm}", f"--model.advantages={shuffled}"],
    }.items():
        subprocess.run([*command, f"--output_dir={tmp_path / name}"], check=True, cwd=ROOT)
        folder, teacher = tmp_path / f"{name}_traces", tmp_path / name / "model"
        explain = [*predict, f"--model.teacher={teacher}", f"--output_dir={folder}"]
        subprocess.run(explain, check=True, cwd=ROOT)
        traces[name] = read(folder / "traces.jsonl")
    for row in (row for rows in traces.values() for row in rows):
        row["right"] = word_sum_kind(row["question"], row["reasoning_trace"])[0] == "steps"

    def rise(before: str, after: str, term: str) -> tuple[float, float]:
        found: tuple[float, float] = learning.rise(traces[before], traces[after], term)
        print(f"figure: {term}, {before} to {after}: {found[0]:+.3f} ± {found[1]:.3f}")
        return found

    difference, error = rise("warmup", "rlt", "reward")
    assert difference >= 3 * error
    assert rise("warmup", "rlt", "closed")[0] >= -0.05
    # Without a signal the teacher drifts, and its reward with it, but not to right steps.
    difference, error = rise("warmup", "control", "right")
    assert difference < 3 * error
    for term in ("reward", "right"):
        difference, error = rise("control", "rlt", term)
        assert difference >= 3 * error, term


def source(folder: Path, name: str) -> list[str]:
    """The option that names a file of small sums."""
    return [f"--data.{'val_source' if name == 'test' else 'source'}={folder / 'sums' / name}.jsonl"]


def held_out_accuracy(folder: Path, model: Path) -> tuple[float, float]:
    """Accuracy on held-out sums, one answer to each, and its variance over problems."""
    command = ["validate", "--config=research/configs/correctness.yaml", f"--model.teacher={model}"]
    command += [f"--output_dir={folder}", *source(folder.parent, "train"), *source(folder.parent, "test")]
    subprocess.run([sys.executable, "-m", "rlt_lightning", *command], check=True, cwd=ROOT)
    with open(folder / "metrics.csv", newline="") as file:
        [row] = csv.DictReader(file)
    accuracy = float(row["reward/val_correct"])
    return accuracy, accuracy * (1 - accuracy) / 256  # problems


@pytest.mark.slow
def test_traditional_rl_makes_more_answers_right(tmp_path: Path) -> None:
    warm, run = tmp_path / "warmup", tmp_path / "run"
    subprocess.run([sys.executable, "research/arithmetic.py", str(tmp_path / "sums")], check=True, cwd=ROOT)
    fit = [sys.executable, "-m", "rlt_lightning", "fit"]
    first = ["--config=research/configs/correctness_warmup.yaml", f"--output_dir={warm}"]
    first += source(tmp_path, "warmup")
    second = ["--config=research/configs/correctness.yaml", f"--output_dir={run}"]
    second += [*source(tmp_path, "train"), *source(tmp_path, "test")]
    for command in (first, [*second, f"--model.teacher={warm / 'model'}"]):
        subprocess.run([*fit, *command], check=True, cwd=ROOT)
    before, before_variance = held_out_accuracy(tmp_path / "before", warm / "model")
    after, after_variance = held_out_accuracy(tmp_path / "after", run / "model")
    error = (before_variance + after_variance) ** 0.5
    print(f"figure: held-out accuracy {before:.3f} to {after:.3f}, ± {error:.3f}")
    assert after - before >= 3 * error
