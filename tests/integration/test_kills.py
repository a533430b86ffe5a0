"""SIGKILL at any moment and resuming by the same command equals not stopping.

The long version, 10 kills each: python -m pytest -m slow tests/integration/test_kills.py -s
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from random import Random
from statistics import median

import pytest
from cases import slow
from commands import Running, start
from compared import largest_difference
from fits import explanation, metrics, read_metrics, small_fit, weights
from kills import fault, kill, wait_for

PHASES = ("generate", "push", "score", "train")
OPTIONS = {
    "single": ["--trainer.devices=1"],
    "zero3": ["--trainer.devices=2", "--config=configs/hardware/zero3.yaml"],
}


def fit(model: str, folder: Path, strategy: str, num_steps: int, *options: str) -> Running:
    """Start the one command that begins a run and resumes it."""
    short = ["--rollouts.sampling.max_completion_length=6", f"--trainer.max_steps={num_steps}"]
    short += ["--trainer.callbacks.init_args.every_n_steps=2", *OPTIONS[strategy], "--resume=true"]
    return start(*small_fit(model, folder, *short, *options), log=folder.with_suffix(".log"))


def finish(model: str, folder: Path, strategy: str, num_steps: int, *options: str) -> None:
    """Run it to its end."""
    run = fit(model, folder, strategy, num_steps, *options)
    assert run.wait(900) == 0, run.stderr[-3000:]


def step_seconds(run: Path) -> float:
    """How long a step of a finished run took, the middle one of all."""
    rows = read_metrics(run).values()
    return median(sum(row[f"perf/{name}_s"] for name in PHASES) for row in rows)


def kill_and_resume(
    model: str, folder: Path, strategy: str, kills: list[tuple[str, str]], num_steps: int, step_s: float
) -> None:
    """Run to the end by the same command over and over, killed once at each (moment, victim).

    Between two kills a run makes two steps or three, so `num_steps` must be 3 for each.
    """
    random = Random(f"kills {strategy} {len(kills)}")
    checkpoints = folder / "checkpoints"

    def finished() -> set[str]:
        return {path.name for path in checkpoints.glob("step=*.ckpt")}

    num_half_written = 0
    for moment, victim in kills:
        before = finished()
        run = fit(model, folder, strategy, num_steps)
        if moment == "loading":
            time.sleep(random.uniform(0, 1))
        else:
            wait_for(lambda before=before: bool(finished() - before), run)
        if moment == "writing":
            wait_for(lambda: any(checkpoints.glob("step=*.tmp")), run)
            time.sleep(random.uniform(0, 0.03))
        elif moment == "step":  # somewhere in sampling, scoring, training
            time.sleep(random.uniform(0, step_s))
        gone_s = kill(run, victim)
        left = sorted(path.name for path in checkpoints.glob("*")) if checkpoints.exists() else []
        num_half_written += any(name.endswith((".tmp", ".old")) for name in left)
        print(f"killed {victim} in {moment}, all gone after {gone_s:.1f} s, left {left}")
    finish(model, folder, strategy, num_steps)
    print(f"figure: {num_half_written} of {len(kills)} kills left a half written or half deleted checkpoint")


def assert_nothing_was_lost(whole: Path, killed: Path, num_steps: int) -> None:
    difference = largest_difference(weights(killed), weights(whole))
    print(f"figure: largest relative difference of a weight tensor: {difference}")
    assert difference <= 1e-6
    expected, found = metrics(whole), metrics(killed)
    assert found.keys() == expected.keys() == set(range(1, num_steps + 1))
    for step, row in expected.items():
        assert found[step] == pytest.approx(row, abs=1e-6), step
    rows = [sorted(map(explanation, (f / "rollouts.jsonl").open())) for f in (whole, killed)]
    assert rows[0] == rows[1]  # none lost, none twice
    assert [path.name for path in (killed / "checkpoints").iterdir()] == [f"step={num_steps:06d}.ckpt"]


def compare(model: str, folder: Path, strategy: str, kills: list[tuple[str, str]], num_steps: int) -> None:
    whole, killed = folder / "whole", folder / "killed"
    finish(model, whole, strategy, num_steps)
    kill_and_resume(model, killed, strategy, kills, num_steps, step_seconds(whole))
    assert_nothing_was_lost(whole, killed, num_steps)


@pytest.mark.parametrize(
    ("strategy", "kills"),
    [("single", [("writing", "all"), ("step", "all")]), slow("zero3", [("written", "rank 1")])],
)
def test_killed_and_resumed_equals_not_stopping(
    strategy: str, kills: list[tuple[str, str]], tiny_model: str, tmp_path: Path
) -> None:
    compare(tiny_model, tmp_path, strategy, kills, num_steps=8)


def kill_at(model: str, folder: Path, steps: int, killing: str, *options: str) -> tuple[Path, Path]:
    """Make a run, and one that kills itself and is resumed; return their folders."""
    whole, killed = folder / "whole", folder / "killed"
    finish(model, whole, "single", steps, *options)
    assert fit(model, killed, "single", steps, *options, killing).wait() == -signal.SIGKILL
    assert not (killed / "model").exists()
    finish(model, killed, "single", steps, *options)
    return whole, killed


@pytest.mark.full
def test_killed_after_the_last_checkpoint_equals_not_stopping(tiny_model: str, tmp_path: Path) -> None:
    # Before the model is written.
    assert_nothing_was_lost(*kill_at(tiny_model, tmp_path, 2, fault("on_train_end", "kill", 2)), 2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "zero3"])
def test_killed_ten_times_and_resumed_equals_not_stopping(
    strategy: str, tiny_model: str, tmp_path: Path
) -> None:
    moments = ["loading"] * 2 + ["step"] * 4 + ["writing"] * 3 + ["written"]
    random = Random(0)
    random.shuffle(moments)
    victims = ["all"] * 10 if strategy == "single" else ["all"] * 4 + ["rank 0"] * 3 + ["rank 1"] * 3
    random.shuffle(victims)
    compare(tiny_model, tmp_path, strategy, list(zip(moments, victims, strict=True)), num_steps=30)


@pytest.mark.full
def test_a_killed_validation_loses_only_its_values(tiny_model: str, tmp_path: Path) -> None:
    options = ["--data.val_rows=2", "--trainer.val_check_interval=1", "--checkpoint.every_n_train_steps=1"]
    killing = fault("on_validation_batch_end", "kill", 2)
    expected, found = map(metrics, kill_at(tiny_model, tmp_path, 3, killing, *options))
    lost = {name for name in expected[2] if "val_" in name}
    assert lost
    assert not lost & found[2].keys()
    assert found == expected | {2: {name: v for name, v in expected[2].items() if name not in lost}}
