"""What a run shows while it computes, and what a dry run leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpo import data, module, rollout_callback

import rlt_lightning
from rlt_lightning.modules.policy import SHOWN


def test_a_log_shows_the_figures_of_an_iteration(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = rlt_lightning.Trainer(
        tmp_path / "run", callbacks=[rollout_callback(4)], accelerator="cpu", max_steps=1
    )
    trainer.fit(module(tiny_model), data(tiny_model, tmp_path))
    assert trainer.progress_bar_metrics.keys() == SHOWN
    captured = capsys.readouterr()
    assert "policy/loss=" in captured.out + captured.err


def test_a_dry_run_leaves_no_model(tiny_model: str, tmp_path: Path) -> None:
    trainer = rlt_lightning.Trainer(
        tmp_path / "run", accelerator="cpu", fast_dev_run=True, callbacks=[rollout_callback(4)]
    )
    trainer.fit(module(tiny_model), data(tiny_model, tmp_path))
    assert not (tmp_path / "run/model").exists()
