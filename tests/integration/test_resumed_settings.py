"""A resumed training has the model, data and reward of its checkpoint, or says what differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import yaml
from commands import rlt
from fits import small_fit
from safetensors.torch import load_file, save_file

from rlt_lightning.tasks.stepwise import chain_rows


def test_other_rows_at_the_same_path_are_refused(tiny_model: str, tmp_path: Path) -> None:
    rows, held_out = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"

    def read_steps() -> int:
        return int(yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["trainer"]["max_steps"])

    def fit(steps: int) -> tuple[int, str]:
        options = [f"--data.source={rows}", f"--data.val_source={held_out}", f"--trainer.max_steps={steps}"]
        ended = rlt(*small_fit(tiny_model, tmp_path / "run", *options, "--resume=true"))
        return ended.returncode, ended.stderr

    for path, seed in ((rows, 1), (held_out, 2)):
        path.write_text("".join(json.dumps(row) + "\n" for row in chain_rows(10, seed=seed)))
    assert fit(1)[0] == 0
    first = rows.read_text()
    rows.write_text("".join(sorted(first.splitlines(keepends=True))))
    status, said = fit(2)
    assert (status, said.count(f"the training rows of {rows}")) == (2, 1), said
    assert read_steps() == 1
    rows.write_text(first)
    status, said = fit(2)
    assert (status, said.count("held-out rows")) == (0, 0), said
    assert read_steps() == 2
    held_out.write_text(first)
    status, said = fit(3)
    assert (status, said.count("The held-out rows are not those")) == (0, 1), said


def test_other_weights_at_the_same_path_are_told(tiny_model: str, tmp_path: Path) -> None:
    run, model = tmp_path / "run", tmp_path / "model"
    shutil.copytree(tiny_model, model)
    assert rlt(*small_fit(str(model), run, "--trainer.max_steps=1")).returncode == 0
    path = model / "model.safetensors"
    save_file({name: -tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    resumed = rlt(*small_fit(str(model), run, "--trainer.max_steps=2", "--resume=true"))
    assert resumed.returncode == 0, resumed.stderr
    assert f"The weights of {model} are not those with which the run began" in resumed.stderr
