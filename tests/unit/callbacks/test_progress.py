"""What a run shows while it computes: a progress bar on a terminal, lines in a log, long waits."""

from __future__ import annotations

import os
import pty
import sys
import termios
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest
from grpo import data, module, rollout_callback

import rlt_lightning
from rlt_lightning.callbacks.progress import has_terminal
from rlt_lightning.modules.base import SHOWN

Captured = pytest.CaptureFixture[str]


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


def test_a_terminal_of_80_columns_holds_the_bar_and_its_figures(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (25, 80))
    printed: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # at the end
            while piece := os.read(ours, 2**16):
                printed.append(piece)

    reader = Thread(target=read)
    with open(terminal, "w") as file, monkeypatch.context() as patch:
        reader.start()
        patch.setattr(sys, "stderr", file)
        patch.setattr(sys, "stdout", file)
        for name in ("COLUMNS", "LINES"):
            patch.delenv(name, raising=False)
        trainer = rlt_lightning.Trainer(
            tmp_path / "run", callbacks=[rollout_callback(4)], accelerator="cpu", max_steps=1
        )
        trainer.fit(module(tiny_model), data(tiny_model, tmp_path))
    reader.join()
    os.close(ours)
    text = b"".join(printed).decode()
    assert "Epoch 0" in text
    assert "/-2" not in text  # as Lightning says where only the steps are limited
    for name in trainer.progress_bar_metrics:
        assert f"{name}: " in text  # neither cut nor broken


def test_a_log_gets_a_line_per_iteration_and_batch(tiny_model: str, tmp_path: Path, capsys: Captured) -> None:
    options = {"accelerator": "cpu", "max_steps": 1, "val_check_interval": 1}
    trainer = rlt_lightning.Trainer(tmp_path / "run", callbacks=[rollout_callback(4)], **options)
    trainer.fit(module(tiny_model), data(tiny_model, tmp_path, val_rows=2, val_batch_size=1))
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("iteration 1/1: policy/loss ") for line in lines), lines
    assert {"validate batch 1/2", "validate batch 2/2"} <= {*lines}
    assert trainer.progress_bar_metrics.keys() == SHOWN


def test_a_dry_run_leaves_no_model(tiny_model: str, tmp_path: Path) -> None:
    trainer = rlt_lightning.Trainer(
        tmp_path / "run", accelerator="cpu", fast_dev_run=True, callbacks=[rollout_callback(4)]
    )
    trainer.fit(module(tiny_model), data(tiny_model, tmp_path))
    assert not (tmp_path / "run/model").exists()
