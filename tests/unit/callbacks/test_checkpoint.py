"""When checkpoints are written: every n iterations, every so often, at the end, and after a score."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rlt_lightning import RLTModule, RolloutCallback, Sampling, TeacherRLData, Trainer
from rlt_lightning.callbacks import Checkpoint
from rlt_lightning.run.metrics_csv import read_rows

ROWS = [{"question": f"What is {n} + 1?", "solution": f"It is \\boxed{{{n + 1}}}."} for n in range(4)]
SAMPLING = Sampling(temperature=0.7, max_completion_length=4)


def list_checkpoints(folder: Path, checkpoint: Checkpoint, num_val: int = 0, **options: Any) -> list[int]:
    """Train, by default for five iterations; return those whose checkpoints are there."""
    options = {"callbacks": [RolloutCallback(sampling=SAMPLING), checkpoint], "max_steps": 5} | options
    ckpt_path = options.pop("ckpt_path", None)
    trainer = Trainer(folder, accelerator="cpu", **options)
    data = TeacherRLData(ROWS, prompts_per_step=1, val_rows=num_val, tags="r1")
    trainer.fit(RLTModule("miniature", "miniature", group_size=2), data, ckpt_path=ckpt_path)
    return sorted(int(path.stem.partition("=")[2]) for path in (folder / "checkpoints").glob("step=*.ckpt"))


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"every_n_train_steps": 2}, [2, 4, 5]),
        ({"train_time_interval": timedelta(0)}, [1, 2, 3, 4, 5]),
        ({"train_time_interval": timedelta(days=1)}, [5]),
    ],
)
def test_checkpoints_come_in_time_and_at_the_end(settings: Any, steps: list[int], tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path, Checkpoint(save_top_k=-1, **settings)) == steps


def test_a_dry_run_leaves_no_model(tmp_path: Path) -> None:
    list_checkpoints(tmp_path, Checkpoint(), fast_dev_run=True)
    assert not (tmp_path / "model").exists()


def test_default_bounds_the_loss_by_ten_minutes() -> None:
    assert Checkpoint().interval == timedelta(minutes=10)
    assert Checkpoint(every_n_train_steps=3).interval is None


def test_a_resumed_run_goes_on_counting_tokens(tmp_path: Path) -> None:
    list_checkpoints(tmp_path, Checkpoint(), max_steps=2)
    list_checkpoints(tmp_path, Checkpoint(), max_steps=4, resume=True)
    read = [row for _, row in read_rows(tmp_path / "metrics.csv")]
    rows = [{name: float(value) for name, value in row.items()} for row in read]
    assert len(rows) == 4
    num_tokens = 0.0
    for row in rows:
        shortest, longest = row["rollout/length_min"], row["rollout/length_max"]
        num_tokens += shortest + longest  # a step has two completions
        assert shortest <= row["rollout/length_mean"] == (shortest + longest) / 2
        assert row["perf/num_tokens"] == num_tokens
        phases = [row[f"perf/{phase}_s"] for phase in ("generate", "push", "score", "train")]
        assert row["perf/step_s"] == pytest.approx(sum(phases), rel=1e-6)
