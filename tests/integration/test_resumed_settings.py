"""A resumed training has the model, data and reward of its checkpoint, or says what differs."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import yaml
from commands import rlt
from fits import small_fit

from rlt_lightning.tasks.stepwise import chain_rows


def test_a_resumed_run_says_what_differs(tiny_model: str, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(tiny_model, other)
    began = rlt(*small_fit(tiny_model, run, "--trainer.max_steps=1"))
    assert began.returncode == 0, began.stderr
    same = rlt(*small_fit(tiny_model, run, "--trainer.max_steps=2", "--resume=true"))
    assert same.returncode == 0, same.stderr
    assert "with other settings" not in same.stderr
    options = [f"--model.teacher={other}", "--model.reward.kl_weight=0.5", "--data.max_length=500"]
    options += ["--model.optimizer.lr=1e-7"]
    changed = rlt(*small_fit(tiny_model, run, "--trainer.max_steps=3", "--resume=true", *options))
    assert changed.returncode == 0, changed.stderr
    [told] = [line for line in changed.stderr.splitlines() if "with other settings" in line]
    assert f"model.init_args.teacher was {tiny_model} and is {other}" in told
    assert "model.init_args.reward" in told
    assert "kl_weight was 3.0 and is 0.5" in told
    assert "data.init_args.max_length was" in told
    rates = [row["policy/lr"] for row in csv.DictReader((run / "metrics.csv").open()) if row["policy/lr"]]
    assert len(set(rates)) == 1
    assert float(rates[0]) > 1e-7


def test_other_rows_at_the_same_path_are_refused(tiny_model: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"

    def read_steps() -> int:
        return int(yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["trainer"]["max_steps"])

    def fit(steps: int) -> tuple[int, str]:
        options = [f"--data.source={rows}", f"--trainer.max_steps={steps}"]
        ended = rlt(*small_fit(tiny_model, tmp_path / "run", *options, "--resume=true"))
        return ended.returncode, ended.stderr

    rows.write_text("".join(json.dumps(row) + "\n" for row in chain_rows(10, seed=1)))
    assert fit(1)[0] == 0
    first = rows.read_text()
    rows.write_text("".join(sorted(first.splitlines(keepends=True))))
    status, said = fit(2)
    assert (status, said.count(f"the training rows of {rows}")) == (2, 1), said
    assert read_steps() == 1
    rows.write_text(first)
    assert fit(2)[0] == 0
    assert read_steps() == 2
