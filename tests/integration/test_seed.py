"""`--seed N` sets all seeds of a verb."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import rlt


def run(verb: str, folder: Path, *options: str) -> dict[str, Any]:
    """The settings that a run has written down."""
    result = rlt(verb, *options, "--trainer.accelerator=cpu", f"--output_dir={folder}")
    assert result.returncode == 0, result.stderr
    return yaml.safe_load((folder / "config.yaml").read_text())


def metrics(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        rows = csv.DictReader(file)
        return [{n: v for n, v in row.items() if not n.startswith("perf/")} for row in rows]


def small(model: str) -> list[str]:
    models = [f"--model.teacher={model}", f"--model.student={model}", "--model.group_size=2"]
    short = ["--rollouts.sampling.max_completion_length=4", "--export.enabled=false"]
    return ["--config=tests/rlt.yaml", *models, *short]


@pytest.mark.full
def test_a_seed_sets_all_but_those_that_are_options(tiny_model: str, tmp_path: Path) -> None:
    # A seed option wins before and after --seed; a config does not.
    (tmp_path / "seeds.yaml").write_text("rollouts: {seed: 5}")
    options = [*small(tiny_model), f"--config={tmp_path / 'seeds.yaml'}", "--trainer.max_steps=2"]
    seeds = ["--data.seed=3", "--seed=7", "--model.init_args.seed=4"]
    config = run("fit", tmp_path / "first", *options, *seeds)
    assert config["seed_everything"] == config["rollouts"]["seed"] == 7
    assert config["data"]["init_args"]["seed"] == 3
    assert config["model"]["init_args"]["seed"] == 4
    first = metrics(tmp_path / "first")
    run("fit", tmp_path / "again", f"--config={tmp_path / 'first' / 'config.yaml'}")
    assert metrics(tmp_path / "again") == first
    run("fit", tmp_path / "other", *options, *seeds[:1], "--seed=8", seeds[2])
    assert metrics(tmp_path / "other") != first
