"""What a run says while it computes: the bar of a terminal, the lines of a log."""

from __future__ import annotations

import os
import pty
import sys
import termios
from collections import Counter
from functools import partial
from pathlib import Path
from threading import Event

import pytest
from commands import wait_until
from lightning.pytorch import Trainer
from test_rlt_module import data, module, rollout_callback
from tqdm import tqdm

import rlt_lightning
from rlt_lightning.callbacks import progress
from rlt_lightning.callbacks.progress import LAYOUT, IterationBar, format_figure
from rlt_lightning.console import waiting_for

Captured = pytest.CaptureFixture[str]


def run_tiny(model: str, folder: Path) -> Trainer:
    """Train for one iteration and validate two held-out batches."""
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_steps=1,
        max_epochs=-1,
        val_check_interval=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[IterationBar(), rollout_callback(4)],
    )
    trainer.fit(module(model), datamodule=data(model, folder, val_rows=2, val_batch_size=1))
    return trainer


def test_a_log_names_long_phases_and_held_out_batches(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(progress, "waiting_for", partial(waiting_for, after_s=0.0))
    run_tiny(tiny_model, tmp_path)
    lines = capsys.readouterr().err.splitlines()
    for what in (
        "the completions of iteration 1/1",
        "the optimizer step of iteration 1/1",
        "the completions of held-out batch 1/2",
        "the scores of held-out batch 2/2",
    ):
        assert any(line.startswith(f"waiting for {what}: ") for line in lines), (what, lines)
    assert [line for line in lines if line.startswith("scored")] == [
        "scored held-out batch 1/2",
        "scored held-out batch 2/2",
    ]


def test_short_phases_are_not_named_in_a_log(capsys: Captured) -> None:
    bar = IterationBar()
    bar.batch = "held-out batch 1/2"
    with bar.watch("score"):
        pass
    assert capsys.readouterr().err == ""


def test_the_bar_shows_phase_and_held_out_batch(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run_tiny(tiny_model, tmp_path)
    shown = capsys.readouterr().err
    assert "iteration [train   ]" in shown
    assert "iteration [held-out batch 2/2: score   ]" in shown
    assert "waiting for" not in shown


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


@pytest.mark.parametrize(("columns", "redrawn"), [(0, False), (100, True)])
def test_a_terminal_without_a_size_gets_lines(
    columns: int, redrawn: bool, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (columns // 4, columns))
    with open(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        patch.setattr(progress, "waiting_for", partial(waiting_for, after_s=0.0))
        run_tiny(tiny_model, tmp_path)
        terminal.flush()
        shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert ("\r\x1b" in shown or "iteration [" in shown) == redrawn
    if not redrawn:
        lines = shown.split("\r\n")
        assert "scored held-out batch 2/2" in lines
        assert any(line.startswith("iteration 1/1: reward ") for line in lines), lines
        assert any(line.startswith("waiting for the completions of iteration 1/1: ") for line in lines), lines
        assert "\r" not in shown.replace("\r\n", "")


@pytest.mark.parametrize(
    ("value", "text"),
    [(4114.2, "4,110"), (123456.0, "123,000"), (999.6, "1,000"), (41.25, "41.2"), (-0.41, "-0.41")],
)
def test_figures_are_written_to_be_read(value: float, text: str) -> None:
    assert format_figure(value) == text


def test_a_narrow_terminal_keeps_the_time_that_is_left() -> None:
    figures = "reward -0.412, closed 0.98, loss 0.00123, tok/s 5,120"
    bar = {"prefix": "iteration [held-out batch 1/2: generate]", "postfix": figures, "bar_format": LAYOUT}
    assert "ETA" in tqdm.format_meter(3, 125, 100.0, ncols=80, **bar)


def test_a_dry_run_leaves_no_model(tiny_model: str, tmp_path: Path) -> None:
    trainer = rlt_lightning.Trainer(
        tmp_path / "run", accelerator="cpu", fast_dev_run=True, callbacks=[rollout_callback(4)]
    )
    trainer.fit(module(tiny_model), data(tiny_model, tmp_path))
    assert not (tmp_path / "run/model").exists()
