"""A resumed training has the model, data and reward of its checkpoint, or says what differs."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from commands import rlt
from fits import small_fit

from rlt_lightning.tasks.stepwise import chain_rows


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
