"""What a run shows while it computes: a progress bar on a terminal, lines in a log, long waits."""

from __future__ import annotations

import pty
import sys
import termios
from pathlib import Path

import pytest
from grpo import data, module, rollout_callback

import rlt_lightning
from rlt_lightning.callbacks.progress import has_terminal


@pytest.mark.parametrize(("columns", "has_bar"), [(0, False), (100, True)])
def test_only_a_terminal_with_a_size_gets_a_bar(
    columns: int, has_bar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (columns // 4, columns))
    with open(terminal, "w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        patch.setattr(sys, "stdout", file)
        assert has_terminal() is has_bar


def test_a_dry_run_leaves_no_model(tiny_model: str, tmp_path: Path) -> None:
    trainer = rlt_lightning.Trainer(
        tmp_path / "run", accelerator="cpu", fast_dev_run=True, callbacks=[rollout_callback(4)]
    )
    trainer.fit(module(tiny_model), data(tiny_model, tmp_path))
    assert not (tmp_path / "run/model").exists()
