"""The parts that all comparisons share: stages in processes, parallel jobs, summed seconds, and tables."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import pytest
from arms import Arms, Setting
from stages import StageError, Stages
from tables import build_tables, show_explanations


def fail(words: list[str], log: Path) -> None:
    log.write_text("gone")
    raise SystemExit(3)


def end_at_once(words: list[str], log: Path) -> None:
    pass


def finish(words: list[str], log: Path) -> None:
    (log.with_suffix("") / "model").mkdir(parents=True)
    (log.with_suffix("") / "model/config.json").touch()


def hang(words: list[str], log: Path) -> None:
    Path(words[0]).touch()
    time.sleep(200)


def test_a_stage_that_fails_names_its_log(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"but ended with 3. Its log is .*a.log:\ngone"):
        Stages(tmp_path).run(["fit"], tmp_path / "a.log", fail)


def test_stages_side_by_side_end_well(tmp_path: Path) -> None:
    stages = Stages(tmp_path)

    def run_many(name: str) -> None:
        for _ in range(20):
            stages.run(["fit"], tmp_path / name, end_at_once)

    with ThreadPoolExecutor(4) as threads:
        [*threads.map(run_many, "abcd")]


def test_a_finished_stage_is_passed_over(tmp_path: Path) -> None:
    folder = Stages(tmp_path, finish)("a", "fit", "laptop/rlt")
    assert Stages(tmp_path, fail)("a", "fit", "laptop/rlt") == folder
    with pytest.raises(StageError, match="must have today's settings"):
        Stages(tmp_path, fail)("a", "fit", "laptop/rlt", data__seed=1)


def test_an_interruption_ends_the_stages_that_run(tmp_path: Path) -> None:
    stages = Stages(tmp_path, hang)
    begin = time.perf_counter()

    def interrupt() -> None:
        while not (tmp_path / "begun").exists():
            time.sleep(0.02)
        raise KeyboardInterrupt

    ones: Any = [SimpleNamespace(prepare=lambda: stages.run([str(tmp_path / "begun")], tmp_path / "log"))]
    ones += [SimpleNamespace(prepare=interrupt)]
    with pytest.raises(KeyboardInterrupt):
        jobs.run_arms(stages, ones, [])
    assert time.perf_counter() - begin < 100


def test_the_clock_adds_up_over_starts(tmp_path: Path) -> None:
    (tmp_path / jobs.CLOCK).write_text("100.0")
    jobs.Clock(tmp_path / jobs.CLOCK).write()
    assert 100 <= float((tmp_path / jobs.CLOCK).read_text()) < 110


def test_the_table_has_a_row_for_every_arm() -> None:
    arms: dict[str, Any] = {"base": {"accuracy": [20.0], "greedy": [90.0]}}
    kinds = {"steps": 80.0, "filler": 10.0, "leap": 5.0, "wrong": 5.0, "other": 0.0}
    arms["rlt"] = {"accuracy": [95.0], "greedy": [99.0], "kinds": [kinds]}
    page = build_tables({"seeds": [0], "arms": arms, "reward_by_kind": {}, "groups": []})
    assert "| untrained student | 20.0 ± 3.5 | 90.0 ± 2.6 |  |" in page
    assert "| **RLT teacher** | 95.0 ± 1.9 | 99.0 ± 0.9 | 80 / 10 / 5 / 5 / 0 |" in page
    assert "| untrained student | +75.0 ± 3.9 | +9.0 ± 2.7 |" in page


def test_explanations_are_shown_with_their_kinds(tmp_path: Path, capsys: Any) -> None:
    one = Arms(Stages(tmp_path), Setting(), 0)
    question, right, leap = (
        "start 2, add 1, times 3?",
        "2 add 1 is 3, 3 times 3 is 9.",
        "clearly it must be 9.",
    )
    rows = [
        {"question": question, "solution": "9", "trace": trace, "reasoning_trace": text, "reward": reward}
        for trace, (text, reward) in enumerate([(right, -0.5), (leap, -0.1), (leap, -0.3)])
    ]
    path = one.folder / "warmup/samples/traces.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    show_explanations(one)
    lines = capsys.readouterr().out.splitlines()
    assert "  warm-up teacher, T 0.7: 2 leaps to the answer, 1 every step right" in lines
    assert lines[lines.index("    best   -0.10  (leaps to the answer)") + 1].strip() == leap
    assert lines[lines.index("    worst  -0.50  (every step right)") + 1].strip() == right
