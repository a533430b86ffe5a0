"""Small runs of `rlt fit`, and reading what they leave: figures, weights, messages."""

from __future__ import annotations

import csv
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from commands import Running


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


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    with open(folder / "metrics.csv", newline="") as file:
        return {
            int(row["step"]): {k: float(v) for k, v in row.items() if v and not k.startswith("perf/")}
            for row in csv.DictReader(file)
        }


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


def explanation(line: str) -> tuple[int, int, int, str]:
    row = json.loads(line)
    return row["step"], row["row"], row["completion"], row["explanation"]


def wait_for(condition: Any, process: Running, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr
        assert time.monotonic() < end
        time.sleep(0.02)


def assert_one_clear_line(result: subprocess.CompletedProcess[str], expected: str) -> None:
    lines = [
        line for line in result.stderr.strip().splitlines() if not line.startswith(("loading ", "waiting "))
    ]
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    assert len(lines) == 1, lines
    assert lines[0].startswith("rlt: error: ")
    assert expected in lines[0]
