"""Slow proofs that runs learn and a control does not: `make prove`, half an hour on two cores."""

from __future__ import annotations

import csv
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("learning", ROOT / "benchmarks" / "learning.py")
assert spec is not None
assert spec.loader is not None
learning = importlib.util.module_from_spec(spec)
spec.loader.exec_module(learning)


def test_rise_compares_the_means_of_problems() -> None:
    # The problems of the first quarter have the means -2 and -8, of the last 1 and -7: a rise of -3 - -5 = 2.
    # Their variances are 18 and 32, so the squared error is 18 / 2 + 32 / 2 = 25.
    def rows(step: int, rewards: dict[int, list[float]]) -> list[dict[str, float]]:
        return [{"step": step, "row": row, "reward": r} for row, values in rewards.items() for r in values]

    first, last = rows(1, {1: [-3, -1], 2: [-9, -7]}), rows(4, {3: [0, 2], 4: [-8, -6]})
    difference, error = learning.rise(first, last, "reward")
    assert difference == pytest.approx(2.0)
    assert error == pytest.approx(5.0)


@pytest.mark.slow
def test_the_reward_rises_and_with_shuffled_advantages_it_does_not(tmp_path: Path) -> None:
    warm, run, control = (tmp_path / name for name in ("warmup", "rlt", "control"))
    shuffled = "--model.advantages=rlt_lightning.numerics.advantages.ShuffledAdvantages"
    fit = [sys.executable, "-m", "rlt_lightning", "fit", "--config"]
    for command in (
        ["configs/quickstart_smollm2_warmup.yaml", f"--output_dir={warm}"],
        ["configs/quickstart_smollm2.yaml", f"--output_dir={run}", f"--model.teacher={warm / 'model'}"],
        [
            "configs/quickstart_smollm2.yaml",
            f"--output_dir={control}",
            f"--model.teacher={warm / 'model'}",
            shuffled,
        ],
    ):
        subprocess.run([*fit, *command], check=True, cwd=ROOT)
    results = {}
    for folder in (run, control):
        rows = [json.loads(line) for line in (folder / "rollouts.jsonl").open()]
        first, last = learning.quarters(rows)
        closed = [
            sum(r["finish_reason"] == "stop" for r in quarter) / len(quarter) for quarter in (first, last)
        ]
        results[folder.name] = (*learning.rise(first, last, "reward"), closed)
    difference, error, closed = results["rlt"]
    assert difference >= 3 * error
    assert closed[1] >= closed[0] - 0.05
    difference, error, _ = results["control"]
    assert difference < 3 * error


def held_out_accuracy(folder: Path, model: Path) -> tuple[float, float]:
    """Accuracy on held-out sums, one answer to each, and its variance over problems."""
    command = ["validate", "--config=configs/learning_correctness.yaml", f"--model.teacher={model}"]
    command += [f"--output_dir={folder}"]
    subprocess.run([sys.executable, "-m", "rlt_lightning", *command], check=True, cwd=ROOT)
    with open(folder / "metrics.csv", newline="") as file:
        [row] = csv.DictReader(file)
    accuracy = float(row["reward/val_correct"])
    return accuracy, accuracy * (1 - accuracy) / 256  # problems


@pytest.mark.slow
def test_traditional_rl_makes_more_answers_right(tmp_path: Path) -> None:
    warm, run = tmp_path / "warmup", tmp_path / "run"
    fit = [sys.executable, "-m", "rlt_lightning", "fit"]
    first = ["--config=configs/learning_correctness_warmup.yaml", f"--output_dir={warm}"]
    second = ["--config=configs/learning_correctness.yaml", f"--output_dir={run}"]
    for command in (first, [*second, f"--model.teacher={warm / 'model'}"]):
        subprocess.run([*fit, *command], check=True, cwd=ROOT)
    before, before_variance = held_out_accuracy(tmp_path / "before", warm / "model")
    after, after_variance = held_out_accuracy(tmp_path / "after", run / "model")
    assert after - before >= 3 * (before_variance + after_variance) ** 0.5
