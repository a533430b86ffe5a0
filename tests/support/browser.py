"""Run folders with made-up files, and a real browser that opens pages without a network."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


@contextmanager
def chromium() -> Iterator[Any]:
    """Headless Chromium; skips the test where there is none."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("needs Chromium, which is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield browser
        browser.close()


def completion(step: int, problem: int, number: int, reward: float, **columns: Any) -> dict[str, Any]:
    """A row of rollouts.jsonl; its reward is split between two terms."""
    return {
        "step": step,
        "row": problem + 1,
        "completion": number,
        "policy_version": step - 1,
        "question": f"How much is {problem} + {problem}?",
        "solution": f"\nIt is {2 * problem}.\n",
        "explanation": f"step {step} word{number} of problem {problem}",
        "finish_reason": "stop",
        "num_tokens": 5 + number,
        "seed": 1,
        "worker": None,
        "reward": reward,
        "solution_reward": reward / 4,
        "kl_reward": 3 * reward / 4,
        "format_reward": 0.0,
        **columns,
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_metrics(folder: Path, columns: dict[str, list[Any]]) -> None:
    """Write metrics.csv, one row per step from 1."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [",".join(["step", *columns])]
    lines += [",".join(map(str, [i + 1, *row])) for i, row in enumerate(zip(*columns.values(), strict=True))]
    (folder / "metrics.csv").write_text("\r\n".join(lines) + "\r\n")


def synthetic_run(folder: Path, num_steps: int = 6) -> Path:
    """A run of 4 problems, 2 a step, with 4 completions: the later, the better; the first has tokens."""
    rows = []
    for step in range(1, num_steps + 1):
        for problem in ((2 * step) % 4, (2 * step + 1) % 4):
            for number in range(4):
                row = completion(step, problem, number, -5 + 0.1 * step + 0.01 * number + problem)
                rows.append(row | tokens() if number == 0 else row)
    write_rows(folder / "rollouts.jsonl", rows)
    steps = range(1, num_steps + 1)
    metrics: dict[str, list[Any]] = {
        "reward/mean": [-5 + 0.1 * step for step in steps],
        "reward/kl": [-3 + 0.1 * step for step in steps],
        "policy/entropy": [1 / step for step in steps],
        "rollout/closed_frac": [1 - math.exp(-step) for step in steps],
        "rollout/length_mean": [60 + step for step in steps],
    }
    write_metrics(folder, metrics)
    return folder


def tokens() -> dict[str, Any]:
    """The columns of tokens: a surprise, an emoji of two tokens, a negative KL, a line's end."""
    return {
        "thought_tokens": ["\n", "So", " twice", "", "🙂", " is"],
        "thought_kl": [0.05, 0.7, 5.25, 0.2, 2.5, -1.75],
        "solution_tokens": ["It", " is", " 2", "."],
        "solution_log_probs": [-0.01, -0.8, -6.5, -2.5],
    }
