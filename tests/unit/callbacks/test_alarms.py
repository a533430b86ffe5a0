"""Which figures of a training ring an alarm, and when."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpo import data, module, rollout_callback

import rlt_lightning
from rlt_lightning.callbacks import Alarms


def titles(alarms: Alarms, name: str, values: list[float]) -> list[list[str]]:
    return [[title for title, _ in alarms.find_alarms({name: value})] for value in values]


def test_a_negative_kl_rings_after_five_iterations() -> None:
    found = titles(Alarms(), "student/kl_mean", [-0.9] * 4 + [-0.3] + [-0.9] * 6)
    assert found == [[]] * 9 + [["The KL is negative"]] * 2


@pytest.mark.parametrize(
    ("name", "values", "title"),
    [
        ("rollout/truncated_frac", [0.1, 0.25], "Completions are cut"),
        ("policy/loss", [1e9, float("nan")], "Not finite"),
    ],
)
def test_other_alarms_ring_at_once(name: str, values: list[float], title: str) -> None:
    assert titles(Alarms(), name, values) == [[], [title]]


def test_an_alarm_pauses(tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = [rollout_callback(4), Alarms(quiet_steps=2)]  # random weights close nothing
    trainer = rlt_lightning.Trainer(tmp_path / "run", callbacks=callbacks, accelerator="cpu", max_steps=3)
    trainer.fit(module(tiny_model), data(tiny_model, tmp_path))
    lines = [line for line in capsys.readouterr().err.splitlines() if "alarm: Completions are cut" in line]
    assert [line.partition("Iteration ")[2].partition(":")[0] for line in lines] == ["1", "3"]
