"""What a run shows while it computes: a progress bar, long waits."""

from __future__ import annotations

import pty
import sys
import termios
from collections import Counter
from functools import partial
from pathlib import Path
from threading import Event

import pytest
from commands import wait_until
from grpo import data, module, rollout_callback

import rlt_lightning
from rlt_lightning.console import waiting_for, wrap_line
from rlt_lightning.modules.base import SHOWN

Captured = pytest.CaptureFixture[str]


def test_only_the_innermost_wait_is_printed(capsys: Captured) -> None:
    inside, asked = Event(), Counter[str]()

    def told(what: str) -> str:
        """Return the text once both waits have begun, and count how often it was asked for."""
        inside.wait()
        asked[what] += 1
        return what

    with waiting_for(partial(told, "the push"), after_s=0), waiting_for(partial(told, "a worker"), after_s=0):
        inside.set()
        wait_until(lambda: min(asked["the push"], asked["a worker"]) > 1)  # the first lines are decided
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith("waiting for a worker: ") for line in lines)


def test_a_line_continues_below_its_text_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    line = "pass   closed   " + "word " * 30
    assert wrap_line(line, indent=16) == line
    _, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (25, 80))
    with open(terminal, "w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        patch.setattr(sys, "__stdout__", file)
        patch.delenv("COLUMNS", raising=False)
        first, *further = wrap_line(line, indent=16).splitlines()
    assert first.startswith("pass   closed   word ")
    assert further
    assert all(len(part) <= 80 and part.startswith(" " * 16 + "word") for part in further)


def test_a_log_shows_the_figures_of_an_iteration(tiny_model: str, tmp_path: Path, capsys: Captured) -> None:
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
