"""Small runs of `rlt fit`, and reading what they leave: figures, weights, messages."""

from __future__ import annotations

import csv
import json
import subprocess
from pathlib import Path

import torch


def small_fit(model: str, folder: Path, *options: str) -> list[str]:
    """`rlt fit` of tests/rlt.yaml at tiny size: a few seconds."""
    return [
        "fit",
        "--config=tests/rlt.yaml",
        f"--model.teacher={model}",
        f"--model.student={model}",
        "--model.group_size=2",
        "--model.optimizer.lr=1e-3",
        "--data.num_embedded_rows=10",
        f"--output_dir={folder}",
        *options,
    ]


def sampled_by(*urls: str, push: str = "IPCPush") -> list[str]:
    """Options with which workers at these addresses sample, and are pushed the weights."""
    named = [
        f"--rollouts.engine.urls={json.dumps(urls)}",
        f"--rollouts.engine.push=rlt_lightning.engines.{push}",
    ]
    return ["--rollouts.engine=rlt_lightning.engines.VLLMEngine", *named]


def read_metrics(folder: Path) -> dict[int, dict[str, float]]:
    """The figures of metrics.csv, by step; none if there is no file yet."""
    if not (folder / "metrics.csv").exists():
        return {}
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    found = {int(row.pop("step")): {name: float(v) for name, v in row.items() if v} for row in rows}
    assert len(found) == len(rows), "a step is there twice"
    return found


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    """The same without what a clock or the memory says."""
    return {
        step: {name: value for name, value in row.items() if not name.startswith("perf/")}
        for step, row in read_metrics(folder).items()
    }


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


def explanation(line: str) -> tuple[int, int, int, str]:
    row = json.loads(line)
    return row["step"], row["row"], row["completion"], row["explanation"]


def assert_one_clear_line(result: subprocess.CompletedProcess[str], expected: str) -> None:
    lines = [
        line for line in result.stderr.strip().splitlines() if not line.startswith(("loading ", "waiting "))
    ]
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    assert len(lines) == 1, lines
    assert lines[0].startswith("rlt: error: ")
    assert expected in lines[0]
