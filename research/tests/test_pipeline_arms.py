"""RLT against the usual pipelines: judging a model's own answers helps its student."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import driver
import pytest
from arms import Setting, read
from pipelines import Pipelines
from stages import Stages


@pytest.mark.slow
def test_students_of_right_answers_beat_those_of_any_answers(tmp_path: Path) -> None:
    setting, names = replace(Setting("main"), num_traces=256), ["unjudged", "rejection"]
    found = driver.run("pipelines", Pipelines, Stages(tmp_path), [setting], [0], names)
    arms = found["settings"]["main"]["arms"]
    print(f"figure: accuracy in percent { {name: arm['accuracy'] for name, arm in arms.items()} }")
    assert arms["rejection"]["accuracy"][0] > arms["unjudged"]["accuracy"][0] + 20
    assert len(read(tmp_path / "main/seed0/data/unjudged.jsonl")) == 256
