"""A recorded run can be replayed without sampling, and what does not fit is refused in one line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import path_of_tests, rlt
from fits import assert_one_clear_line
from tiny import QUICKSTART

from rlt_lightning.engines import EngineError, ReplayEngine, SampleRequest, Sampling, sample_all
from rlt_lightning.engines.replay import checksum_prompt
from rlt_lightning.types import InputError

MEASURED = ("perf/", "rollout/sampled_s")
ROW = {
    "step": 2, "row": 7, "completion": 0, "token_ids": [5, 6], "log_probs": [-0.5, -0.25],
    "finish_reason": "stop", "temperature": 0.7, "prompt_crc32": checksum_prompt([1, 2, 3]),
}  # fmt: skip


def metrics(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if not name.startswith(MEASURED)} for row in rows]


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_replayed_run_equals_the_recorded_one(devices: int, tmp_path: Path) -> None:
    options = [*QUICKSTART, f"--trainer.devices={devices}", "--export.enabled=false"]
    # Rewards of even rows are equal by construction, so that other problems take their places.
    options += ["--model.reward=parity.Parity", "--rollouts.dynamic_sampling.max_rounds=2"]
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    environment = {"PYTHONPATH": path_of_tests()}
    result = rlt(*options, "--recorder.token_ids=true", f"--output_dir={recorded}", **environment)
    assert result.returncode == 0, result.stderr
    assert (recorded / "dropped.jsonl").stat().st_size
    engine = "--rollouts.engine=rlt_lightning.engines.ReplayEngine"
    path = f"--rollouts.engine.rollouts={recorded / 'rollouts.jsonl'}"
    result = rlt(*options, engine, path, f"--output_dir={replayed}", **environment)
    assert result.returncode == 0, result.stderr
    assert metrics(replayed) == metrics(recorded)
    before, after = (
        [json.loads(line) for line in (f / "rollouts.jsonl").open()] for f in (recorded, replayed)
    )
    assert [row["worker"] for row in after] == ["replay"] * len(before)
    assert [(row["explanation"], row["reward"]) for row in after] == [
        (row["explanation"], row["reward"]) for row in before
    ]


def test_completions_come_by_step_row_and_number(tmp_path: Path) -> None:
    other = ROW | {"completion": 1, "token_ids": [9], "log_probs": None, "finish_reason": "length"}
    engine = ReplayEngine(write(tmp_path / "rollouts.jsonl", other, ROW))
    [[first, second]] = sample_all(engine, [SampleRequest([1, 2, 3], 0, 2, step=1, row=7)], Sampling(), "")
    assert (first.token_ids, first.log_probs, first.finish_reason) == ([5, 6], [-0.5, -0.25], "stop")
    assert (second.token_ids, second.log_probs, second.finish_reason) == ([9], None, "length")


@pytest.mark.parametrize(
    ("request_of", "fault"),
    [
        (
            lambda: SampleRequest([1, 2, 3], 0, 1, step=0, row=7),
            "step 1, row 7 .* has completions \\[\\] instead of \\[0\\]",
        ),
        (lambda: SampleRequest([1, 2, 3], 0, 2, step=1, row=7), "completions \\[0\\] instead of \\[0, 1\\]"),
        (lambda: SampleRequest([1, 2, 4], 0, 1, step=1, row=7), "completions of another prompt"),
        (lambda: SampleRequest([1, 2, 3], 0, 1, 1, step=1, row=7), "2 tokens, above the limit of 1"),
        (lambda: SampleRequest([1, 2, 3], 0, 1), "training steps only"),
    ],
)
def test_what_does_not_fit_the_step_is_refused(
    request_of: Callable[[], SampleRequest], fault: str, tmp_path: Path
) -> None:
    engine = ReplayEngine(write(tmp_path / "rollouts.jsonl", ROW))
    with pytest.raises(EngineError, match=fault):
        sample_all(engine, [request_of()], Sampling(), "")


def test_a_file_without_token_ids_is_refused(finished_run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"recorder\.token_ids"):
        ReplayEngine(str(finished_run / "rollouts.jsonl"))
    with pytest.raises(InputError, match="is no file"):
        ReplayEngine(str(tmp_path / "none.jsonl"))
    result = rlt(
        *QUICKSTART,
        "--rollouts.engine=rlt_lightning.engines.ReplayEngine",
        f"--rollouts.engine.rollouts={finished_run / 'rollouts.jsonl'}",
        f"--output_dir={tmp_path / 'run'}",
    )
    assert_one_clear_line(result, "recorder.token_ids")
